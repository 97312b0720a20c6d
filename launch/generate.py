"""Continue a text with a run's newest weights:

python launch/generate.py runs/quickstart-1a2b3c4d "def main("
python launch/generate.py runs/quickstart-1a2b3c4d "import os" --tokens 200 --temperature 0
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.commands import command_line, in_this_form
from toolkit.errors import InputError, Problem, run_command
from toolkit.logs import configure_logging
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.find import find_run


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    parser = argparse.ArgumentParser(
        prog=command_line("generate"),
        description=in_this_form(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run directory, or runs/NAME of a run named NAME")
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument("--tokens", type=int, default=64, help="number of tokens to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--weights", type=Path, help="a checkpoint in any format (default: the run's newest, or its export)"
    )
    parser.add_argument("--data", type=Path, help="the folder with the tokenizer (default: the run's data)")
    parser.add_argument(
        "--special-tokens",
        choices=("refuse", "text", "parse"),
        help="how to treat special tokens in the prompt (default: as in the run's data)",
    )
    options = parser.parse_args(arguments)
    return run_command(lambda: print(options.prompt + generate(options)))


def generate(options: argparse.Namespace) -> str:
    """Return the text that follows the prompt.

    Raises:
        UserError: the run, its weights or its tokenizer cannot be used.
    """
    directory = RunDirectory(find_run(options.run, "run"))
    if not directory.plan_file.is_file():
        raise InputError(
            Problem(
                "run",
                f"run={options.run}",
                "a run directory has a plan.json",
                "pass the folder that training printed",
            )
        )
    model = json.loads(directory.plan_file.read_text(encoding="utf-8"))["model"]
    if model is None:
        raise InputError(
            Problem(
                "run",
                f"{options.run} trains model.target",
                "text is generated with the families' models",
                "load its weights in your own script with toolkit.checkpoint.open_reader",
            )
        )
    from toolkit.checkpoint import open_reader
    from toolkit.checkpoint_folder import newest_checkpoint
    from toolkit.config.compose import from_yaml
    from toolkit.config.special_tokens import SpecialTokens
    from toolkit.data.checks import special_tokens_mode, tokenizer_folder
    from toolkit.families.model_files import parse_model_shape
    from toolkit.train.generate import continue_text, load_model, load_tokenizer

    shape = parse_model_shape(model, directory.plan_file)
    config = from_yaml(directory.config_file.read_text(encoding="utf-8")).data
    data = options.data or tokenizer_folder(config)
    special = (
        SpecialTokens[options.special_tokens] if options.special_tokens else special_tokens_mode(config, data)
    )
    weights = options.weights or newest_checkpoint(directory.checkpoints) or directory.export
    reader = open_reader(weights, model=shape)
    module, tokenizer = load_model(shape, reader), load_tokenizer(data, reader)
    return continue_text(
        module,
        tokenizer,
        options.prompt,
        tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
        context=shape.max_position_embeddings,
        special_tokens=special,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
