"""Merge this machine's pip configuration into one file for a build, and print the local folders it refers to.

    python docker/pip_here.py FILE             write FILE; print one folder per line

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
    settings = RawConfigParser()
    settings.read(path.expanduser() for path in FILES)
    if not settings.has_section("global"):
        settings.add_section("global")
    for setting in SETTINGS:
        value = os.environ.get(f"PIP_{setting.upper().replace('-', '_')}")
        if value:
            settings.set("global", setting, value)
    with Path(file).open("w", encoding="utf-8") as text:
        settings.write(text)
    words = " ".join(value for section in settings.sections() for _, value in settings.items(section)).split()
    named = (Path(word.removeprefix("file://")) for word in words if word.startswith(("/", "file:///")))
    for folder in sorted(
        {folder.parent if folder.name == "simple" else folder for folder in named if folder.is_dir()}
    ):
        print(folder)  # the root of an index (PEP 503), which also has the files
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
