"""What pip is told on this machine, as one file for a build, and which folders of this machine it names.

    python docker/pip_here.py FILE             writes FILE; prints the folders, one a line

Any Python 3, standard library only.
"""

from __future__ import annotations

import os
import sys
from configparser import RawConfigParser
from pathlib import Path

FILES = (
    Path("/etc/pip.conf"),
    Path("~/.pip/pip.conf"),
    Path("~/.config/pip/pip.conf"),
)  # in pip's order: a later one wins
SETTINGS = ("index-url", "extra-index-url", "find-links", "trusted-host", "cert", "timeout", "retries")


def main(file: str) -> int:
    told = RawConfigParser()
    told.read(path.expanduser() for path in FILES)
    if not told.has_section("global"):
        told.add_section("global")
    for setting in SETTINGS:
        value = os.environ.get(f"PIP_{setting.upper().replace('-', '_')}")
        if value:
            told.set("global", setting, value)
    with Path(file).open("w", encoding="utf-8") as text:
        told.write(text)
    words = " ".join(value for section in told.sections() for _, value in told.items(section)).split()
    named = (Path(word.removeprefix("file://")) for word in words if word.startswith(("/", "file:///")))
    for folder in sorted(
        {folder.parent if folder.name == "simple" else folder for folder in named if folder.is_dir()}
    ):
        print(folder)  # of an index (PEP 503) with the files beside its pages
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
