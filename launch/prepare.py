"""Prepare text for training: tokenized shards in Megatron's format with a manifest. Or inspect them.

    python launch/prepare.py input=books output=data/books     # .txt, .jsonl, .json, .csv, .parquet, archives
    python launch/prepare.py input='corpus/*.jsonl.zst' text=content deduplicate=true output=data/corpus
    python launch/prepare.py input=allenai/c4 format=dataset dataset.name=en output=data/c4  # HF datasets
    python launch/prepare.py input=s3://bucket/texts output=data/texts        # object stores: s3, gs, az
    python launch/prepare.py import=megatron/train tokenizer.path=gpt2    # existing .bin and .idx of Megatron
    python launch/prepare.py inspect=data/books                           # verify every byte, print a summary
    python launch/prepare.py input=stdlib                                   # the embedded text of data=stdlib

After an interruption, the same command resumes; the result is identical for any number of workers. Then train
on it: python launch/train.py data=prepared data.path=data/books. Exit code: 0 done, 2 a mistake, reported
with its rule and remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from toolkit.errors import run_command
from toolkit.logs import configure_logging


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help
        from toolkit.config.roots import PREPARE

        return show_help(arguments, above=__doc__ or "", root=PREPARE)
    return run_command(partial(show, arguments))


def show(overrides: Sequence[str]) -> None:
    """Prepare, import or inspect, and print a summary. Raises UserError with every problem."""
    from toolkit.config.compose import compose_prepare
    from toolkit.progress import Progress

    config = compose_prepare(overrides)
    with Progress() as progress:
        if config.inspect is not None:
            from toolkit.data.prepare.inspect import inspect

            lines = inspect(config, progress)
        else:
            from toolkit.data.manifest import describe_manifest
            from toolkit.data.prepare import report
            from toolkit.data.prepare.import_megatron import import_megatron
            from toolkit.data.prepare.run import prepare

            manifest = (
                prepare(config, progress) if config.import_path is None else import_megatron(config, progress)
            )
            lines = [
                f"data       {manifest.folder}",
                *describe_manifest(manifest),
                *report.describe_preparation(manifest),
            ]
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
