"""Make the data of a run ready and show what it is; training then finds it in place.

    python launch/prepare.py data=stdlib                                      # the embedded text
    python launch/prepare.py data=stdlib data.path=/tmp/text data.vocab_size=8192
    python launch/prepare.py data=prepared data.path=FOLDER                    # read every byte of a data folder and compare

The words after the file's name are those of launch/train.py. Exit code: 0 done, 2 a mistake, named with its rule and remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from toolkit.errors import ExitCode, UserError


def main(arguments: Sequence[str]) -> int:
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help

        return show_help(arguments, above=__doc__ or "")
    try:
        prepare(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    return ExitCode.DONE


def prepare(overrides: Sequence[str]) -> None:
    """Raises UserError with every problem."""
    from toolkit.config.compose import compose
    from toolkit.data.index import verify
    from toolkit.data.manifest import describe
    from toolkit.data.sources import ready
    from toolkit.progress import Progress

    data = compose(overrides).data
    with Progress() as progress:
        manifest = ready(data, progress)
        verify(manifest.folder, progress)
    print("\n".join([f"data       {manifest.folder}", *describe(manifest)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
