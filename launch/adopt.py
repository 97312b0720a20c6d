"""Turn configurations of other tools into an experiment of this toolkit.

    python launch/adopt.py ds_config.json                                 print the experiment
    python launch/adopt.py ds_config.json training_args.json --output=conf/exp/mine.yaml
    python launch/adopt.py train_gpt.sh --output=conf/exp/mine.yaml       Megatron-LM's arguments
    python launch/adopt.py default_config.yaml --ranks=8                  accelerate, for 8 processes

FILE is a DeepSpeed JSON (also with auto), the TrainingArguments of Hugging Face's Trainer as JSON, the YAML
of `accelerate config`, or a shell script or list with arguments of Megatron-LM; a script is read and not
executed. Files of one run are named together. Each key of each file is accounted for in a comment: mapped
exactly, mapped with a changed meaning, already the default, or refused with the reason. Exit codes: 0 done,
2 a mistake.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from toolkit.commands import command_line, in_this_form
from toolkit.errors import ConfigError, Problem, run_command
from toolkit.logs import configure_logging


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    parser = argparse.ArgumentParser(
        prog=command_line("adopt"),
        description=in_this_form(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, help="the experiment to write: conf/exp/NAME.yaml")
    parser.add_argument("--ranks", type=int, help="number of processes, if no file names it")
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    options = parser.parse_args(list(arguments))
    return run_command(partial(show, options), "--output")


def show(options: argparse.Namespace) -> None:
    """Write or print the experiment, and a summary. Raises UserError with every problem."""
    from toolkit.adopt.check import resolve_adoption
    from toolkit.adopt.decide import adopt
    from toolkit.adopt.experiment import summary, write_experiment
    from toolkit.adopt.read import read_source
    from toolkit.files import write_whole

    output: Path | None = options.output
    check_output(output, force=options.force)
    files = [file.name for file in options.files]
    adoption, plan = resolve_adoption(
        adopt([read_source(file) for file in options.files], options.ranks), files
    )
    text = in_this_form(write_experiment(adoption, "adopted" if output is None else output.stem, files))
    if output is None:
        print(text, end="")
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, text)
        print(f"{output}: {summary(adoption)}\n{next_command(output)}")
    for warning in plan.warnings:
        print(warning, file=sys.stderr)


def check_output(output: Path | None, *, force: bool) -> None:
    """Refuse a file that is not an experiment's, or exists. Raises ConfigError."""
    if output is None:
        return
    if output.suffix != ".yaml" or output.absolute().parent.name != "exp":
        raise ConfigError(
            Problem(
                "--output",
                f"--output={output}",
                "an experiment is a file NAME.yaml in a folder exp",
                "write --output=conf/exp/mine.yaml",
            )
        )
    if output.exists() and not force:
        raise ConfigError(
            Problem("--output", f"--output={output} exists", "an experiment is not replaced", "add --force")
        )


def next_command(output: Path) -> str:
    """Return the command that plans the experiment from the current folder."""
    from toolkit.config import search_path

    found = output.resolve().parent.parent in search_path.folders(None)
    own = [] if found else [f"--config-dir={output.parent.parent}"]
    return command_line("plan", *own, f"+exp={output.stem}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
