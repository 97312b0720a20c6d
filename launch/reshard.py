"""Convert a checkpoint to another engine, format or layout, with its optimizer state. Or inspect it.

    python launch/reshard.py source=runs/mine action=inspect            # format, layout, tensors, sizes
    python launch/reshard.py source=runs/mine target=out target.format=deepspeed target.zero=stage3
    python launch/reshard.py source=ds target=mcore target.format=megatron target.parallel.tensor=4
    python launch/reshard.py source=iter_0000500 target=native model=pretrained model.pretrained=org/model
    python launch/reshard.py source=runs/mine target=weights target.format=huggingface target.precision=bf16
    python launch/reshard.py source=runs/mine target=out target.format=universal action=plan  # cost
    python launch/reshard.py source=ds action=verify                     # read every byte and value
    python launch/reshard.py source=s3://bucket/mine action=verify        # the newest checkpoint in a store
    python launch/reshard.py source=ds target=mcore action=diff          # compare tensors across formats

After an interruption, the same command resumes; the target gets its final name only when it is complete.
Training also resumes from any format directly: python launch/train.py ... resume=PATH. Exit code: 0 done
(verify: sound, diff: equal), 1 verify found a problem or diff a difference, 2 a mistake or a damaged source,
reported with its rule and remedy, 75 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from toolkit.config.urls import is_url
from toolkit.errors import ExitCode, run_command
from toolkit.logs import configure_logging
from toolkit.rundir.find import find_run


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help
        from toolkit.config.roots import RESHARD

        return show_help(arguments, above=__doc__ or "", root=RESHARD)
    try:
        return run_command(partial(run_action, arguments))
    except KeyboardInterrupt:
        print("interrupted: run the same command to resume", file=sys.stderr)
        return ExitCode.STOPPED


def run_action(overrides: Sequence[str]) -> ExitCode:
    """Run the action and print its result. Raises UserError with every problem."""
    from toolkit.config.compose import compose_reshard
    from toolkit.config.reshard import ReshardAction
    from toolkit.progress import Progress

    config = compose_reshard(overrides)
    assert config.source is not None, "compose_reshard rejects a null source"
    if not is_url(config.source):
        config.source = str(find_run(config.source, "source"))
    if config.action is ReshardAction.diff and config.target.path is not None:
        config.target.path = str(find_run(config.target.path, "target"))
    from toolkit.checkpoint.offline import reshard

    code = ExitCode.DONE
    with Progress() as progress:
        match config.action:
            case ReshardAction.convert:
                lines = reshard.describe_result(reshard.convert(config, progress))
            case ReshardAction.plan:
                lines = reshard.plan(config)
            case ReshardAction.inspect:
                lines = reshard.inspect(config)
            case ReshardAction.verify:
                code, lines = reshard.verify(config, progress)
            case ReshardAction.diff:
                code, lines = reshard.diff(config, progress)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
