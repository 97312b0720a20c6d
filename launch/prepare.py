"""Make text ready to train on: tokenised shards in Megatron's format, a manifest, statistics. Or see what such a folder is.

    python launch/prepare.py input=books output=data/books                    # .txt, .jsonl, .json, .csv, .parquet, compressed, in archives
    python launch/prepare.py input='corpus/*.jsonl.zst' text=content tokenizer.path=gpt2 deduplicate=true output=data/corpus
    python launch/prepare.py input=allenai/c4 format=dataset dataset.name=en output=data/c4      # any source of the package datasets
    python launch/prepare.py input=s3://bucket/texts output=data/texts              # files in a store: s3, gs, az
    python launch/prepare.py import=megatron/train tokenizer.path=gpt2              # Megatron's .bin and .idx made by others
    python launch/prepare.py inspect=data/books                               # verify every byte and show what it is
    python launch/prepare.py input=stdlib                                     # the embedded text, as data=stdlib trains on it

Killed at any moment, the same command goes on where it was, and the result is the same to the byte, for any number of workers.
Then train on it: python launch/train.py data=prepared data.path=data/books. Exit code: 0 done, 2 a mistake, named with its rule
and remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from toolkit.errors import ExitCode, UserError, file_errors
from toolkit.logs import configure_logging


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help
        from toolkit.config.roots import PREPARE

        return show_help(arguments, above=__doc__ or "", root=PREPARE)
    try:
        with file_errors():
            show(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    return ExitCode.DONE


def show(overrides: Sequence[str]) -> None:
    """Print what was made, or what is there. Raises UserError with every problem."""
    from toolkit.config.compose import compose_prepare
    from toolkit.progress import Progress

    config = compose_prepare(overrides)
    with Progress() as progress:
        if config.inspect is not None:
            from toolkit.data.prepare.inspect import inspect

            lines = inspect(config, progress)
        else:
            from toolkit.data.manifest import describe
            from toolkit.data.prepare import report
            from toolkit.data.prepare.imported import import_shards
            from toolkit.data.prepare.run import prepare

            manifest = (
                prepare(config, progress) if config.import_path is None else import_shards(config, progress)
            )
            lines = [f"data       {manifest.folder}", *describe(manifest), *report.describe(manifest)]
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
