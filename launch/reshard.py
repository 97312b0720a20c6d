"""Make a checkpoint of one engine and layout into one of another, optimizer state included. Or see what a checkpoint is.

    python launch/reshard.py source=runs/mine action=inspect                         # format, layout, tensors, steps, sizes
    python launch/reshard.py source=runs/mine target=out target.format=deepspeed target.zero=stage3 target.parallel.data=8
    python launch/reshard.py source=ds/global_step500 target=mcore target.format=megatron target.parallel.tensor=4
    python launch/reshard.py source=iter_0000500 target=native model=pretrained model.pretrained=meta-llama/Llama-2-7b-hf
    python launch/reshard.py source=runs/mine target=weights target.format=huggingface target.precision=bf16
    python launch/reshard.py source=runs/mine target=out target.format=universal action=plan    # bytes, reads, memory, time
    python launch/reshard.py source=ds action=verify                                 # look at every byte and value
    python launch/reshard.py source=ds target=mcore action=diff                      # the same tensors, in any two formats?

Killed at any moment, the same command goes on where it was; the target has its name only when it is whole. Training starts straight
from any of them, too: python launch/train.py ... resume=PATH. Exit code: 0 done (verify: sound, diff: equal), 1 verify found
something or diff a difference, 2 a mistake or a damaged source, each named with its rule and remedy, 75 interrupted: the same command
goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from toolkit.errors import ExitCode, UserError, file_errors
from toolkit.logs import configure_logging
from toolkit.rundir.find import find_run


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help
        from toolkit.config.roots import RESHARD

        return show_help(arguments, above=__doc__ or "", root=RESHARD)
    try:
        with file_errors():
            return carry_out(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where it was", file=sys.stderr)
        return ExitCode.STOPPED


def carry_out(overrides: Sequence[str]) -> ExitCode:
    """Print what was done or found. Raises UserError with every problem."""
    from toolkit.config.compose import compose_reshard
    from toolkit.config.reshard import Action
    from toolkit.progress import Progress

    config = compose_reshard(overrides)
    assert config.source is not None, "compose_reshard refuses a source that is null"
    config.source = str(find_run(config.source, "source"))
    if config.action is Action.diff and config.target.path is not None:
        config.target.path = str(find_run(config.target.path, "target"))
    from toolkit.checkpoint.offline import reshard

    code = ExitCode.DONE
    with Progress() as progress:
        match config.action:
            case Action.convert:
                lines = reshard.words_of(reshard.convert(config, progress))
            case Action.plan:
                lines = reshard.plan(config)
            case Action.inspect:
                lines = reshard.inspect(config)
            case Action.verify:
                code, lines = reshard.verify(config, progress)
            case Action.diff:
                code, lines = reshard.diff(config, progress)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
