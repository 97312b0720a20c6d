"""Choose the tensors and dtypes of a target: weights in the run's precision, fp32 masters of 16-bit
weights, fp32 moments.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.checkpoint import catalog
from toolkit.checkpoint.scalars import WEIGHTS_DTYPE
from toolkit.checkpoint.shard import MASTER, WEIGHT, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource
from toolkit.config.schema import Precision

DTYPE_OF_PRECISION: Mapping[Precision, str] = {
    Precision.fp32: "float32",
    Precision.bf16: "bfloat16",
    Precision.fp16: "float16",
}


def choose_weights_dtype(source: CheckpointSource, precision: Precision | None) -> str:
    """Return the dtype of the target's weights: ``precision``, else the most frequent one among the source's
    weights.

    A source with masters only (DeepSpeed's ZeRO 3 and universal checkpoints in 16 bits) records the dtype of
    its run.
    """
    if precision is not None:
        return DTYPE_OF_PRECISION[precision]
    found = [info.dtype for key, info in source.catalog.tensors.items() if key.state == WEIGHT]
    return (
        max(sorted(set(found)), key=found.count)
        if found
        else str(source.catalog.scalars.get(WEIGHTS_DTYPE, "float32"))
    )


def select_target_tensors(
    source: CheckpointSource, precision: Precision | None, *, optimizer: bool, uniform: bool = True
) -> dict[TensorKey, TensorInfo]:
    """Return the tensors of a target with all parameters of ``source``, by state and in the source's order of
    names.

    Args:
        source: The source.
        precision: Requested precision of the weights; None uses the source's.
        optimizer: Include masters (of 16-bit weights) and the optimizer's states.
        uniform: Use one dtype for all weights, for formats that require it. Otherwise, without a requested
            precision, each weight keeps its stored dtype: fp32 norms among 16-bit weights have no master and
            would be rounded. Integers always keep theirs.
    """
    dtype, there = choose_weights_dtype(source, precision), source.catalog.tensors
    shapes = {key.name: info.shape for key, info in there.items()}

    def target_dtype(key: TensorKey) -> str:
        stored = there[key].dtype if key in there else dtype
        kept = not catalog.DTYPES[stored].is_float or (precision is None and not uniform)
        return stored if kept else dtype

    found = {
        key: TensorInfo(target_dtype(key), shape)
        for key, shape in ((TensorKey(WEIGHT, name), shape) for name, shape in shapes.items())
    }
    if not optimizer:
        return found
    states = list(dict.fromkeys(key.state for key in there if key.state not in (WEIGHT, MASTER)))
    if dtype != "float32" and (states or any(key.state == MASTER for key in there)):
        states.insert(0, MASTER)
    for state in states:
        for name, shape in shapes.items():
            needed = state == MASTER and found[TensorKey(WEIGHT, name)].dtype != "float32"
            if needed or TensorKey(state, name) in there:
                found[TensorKey(state, name)] = TensorInfo("float32", shape)
    return found
