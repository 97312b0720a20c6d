"""Which tensors a target holds, and in which dtypes: weights in the run's precision, masters beside 16 bits, moments in fp32."""

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
    """The dtype of the target's weights: ``precision``, or else that of most weights of the source. A source that holds masters alone
    (DeepSpeed's ZeRO 3 and universal folders in 16 bits) says which dtype its run had."""
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
    """The tensors of a target that has all the parameters of ``source``, by state and in the source's order of names.

    Args:
        optimizer: with masters (where weights are of 16 bits) and the optimizer's tensors that the source has.
        uniform: every weight in one dtype, for formats that know one. Otherwise, where no precision is asked, each weight as it is
            stored: norms that stand in fp32 among weights of 16 bits have no master, and would be rounded. Integers stay what they are.
    """
    dtype, there = choose_weights_dtype(source, precision), source.catalog.tensors
    shapes = {key.name: info.shape for key, info in there.items()}

    def of_weight(key: TensorKey) -> str:
        stored = there[key].dtype if key in there else dtype
        kept = not catalog.DTYPES[stored].is_float or (precision is None and not uniform)
        return stored if kept else dtype

    found = {
        key: TensorInfo(of_weight(key), shape)
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
