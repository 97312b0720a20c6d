"""Checkpoints without files, described by sizes and ranks. Pieces are created on access.

python -m tests.checkpoint.synthetic_catalogs llama-3.1-405b 1024 None

plans ZeRO-3 -> TP8 x PP16 x DP8 and prints its numbers.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from toolkit import families
from toolkit.checkpoint.catalog import DTYPES, Catalog, DamagedFile, LazyPieces, TensorPiece
from toolkit.checkpoint.formats.deepspeed.geometry import BufferRange, range_pieces, share_numel, share_ranges
from toolkit.checkpoint.offline.plan import plan_reshard
from toolkit.checkpoint.offline.reshard import lay_out
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource
from toolkit.config.reshard import TargetConfig, TargetFormat, TargetParallelConfig, TargetZeroStage
from toolkit.config.schema import Precision
from toolkit.errors import CheckpointError, Problem
from toolkit.families import PUBLISHED

STATES = (MASTER, EXP_AVG, EXP_AVG_SQ)
OPTIM = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def damage_error(folder: Path, damage: DamagedFile) -> CheckpointError:
    return CheckpointError(Problem(damage.file, damage.seen, damage.rule, "none"))


def zero3(model: str, ranks: int, missing: int | None = None) -> CheckpointSource:
    """The ZeRO 3 optimizer files of a 16-bit run: a flat buffer of masters and of each moment in each rank's
    file.

    Args:
        missing: A rank whose file is missing.
    """
    config = PUBLISHED[model]
    family = families.get_family(str(config.family))
    shape = family.resolve_shape(config)
    parameters = family.parameters(shape)
    starts: dict[str, int] = {}
    held = 0
    for spec in parameters:
        starts[spec.name] = held
        held += share_numel(spec.numel, ranks)
    tensors = {
        TensorKey(state, spec.name): TensorInfo("float32", spec.shape)
        for state in STATES
        for spec in parameters
    }
    base = {state: 4096 + number * held * DTYPES["float32"].itemsize for number, state in enumerate(STATES)}
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)]

    def ranges(at: int, numel: int) -> Iterator[BufferRange]:
        return (part for part in share_ranges(at, numel, ranks) if part.rank != missing)

    def make(key: TensorKey) -> tuple[TensorPiece, ...]:
        info = tensors[key]
        box = Box.whole(info.shape)
        return range_pieces(
            key,
            info.dtype,
            info.shape,
            box,
            ranges(starts[key.name], box.numel),
            lambda rank: (names[rank], base[key.state], None),
        )

    catalog = Catalog(
        Path("/described"),
        tensors,
        LazyPieces(tensors, make),
        {"step": 500, "optimizer_step": 500, "optim": OPTIM},
    )
    return CheckpointSource(
        format="deepspeed",
        catalog=catalog,
        namespace=family.namespace,
        step=500,
        shape=shape,
        damage_error=damage_error,
    )


def main(model: str, ranks: str, missing: str) -> None:
    began = time.process_time()
    source = zero3(model, int(ranks), None if missing == "None" else int(missing))
    parallel = TargetParallelConfig(data=8, tensor=8, pipeline=16)
    config = TargetConfig(
        format=TargetFormat.megatron, parallel=parallel, zero=TargetZeroStage.stage1, precision=Precision.bf16
    )
    try:
        plan = plan_reshard(source.catalog, lay_out(source, config))
    except CheckpointError as error:
        print(f"wrong={str(error).splitlines()[0]}")
        return
    assert source.shape is not None
    parameters = families.get_family(source.shape.family).parameters(source.shape)
    print(f"parameters={sum(spec.numel for spec in parameters)}")
    print(f"read={plan.bytes_read}\nreads={plan.reads}\nwritten={plan.target_bytes}\nwrites={plan.writes}")
    print(
        f"source_pieces={plan.source_pieces}\ntarget_pieces={plan.target_pieces}"
        f"\ncpu_seconds={time.process_time() - began:.1f}"
    )
    print(f"peak_bytes={resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}")


if __name__ == "__main__":
    main(*sys.argv[1:])
