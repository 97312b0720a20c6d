"""Trace a module: run its forward and backward pass without computing values, and record what happens.

Tensors are torch's fake tensors, which have a shape and a dtype but no memory, so a model that needs many
GPUs is traced on a laptop in seconds. The operators are those of the module itself, for the CPU; the fused
attention kernel of CPUs stores what those of GPUs store. Of repeated blocks a few are traced, and the others
are extrapolated.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.families.base import ParameterSpec
from toolkit.models import operator_recorder
from toolkit.models.build import replace_parameters
from toolkit.models.operator_recorder import NO_WORK, OperatorRecorder
from toolkit.plan.hugging_face import block_number
from toolkit.plan.trace import ModuleTrace, OperatorWork

# Fewer blocks are all traced; of more, one trace has BASE blocks, one BASE + 1, and one CHECK blocks.
MOST_TRACED, BASE, CHECK = 8, 2, 4
# How much the growth per block of the peak may differ from that of the saved tensors.
TOLERANCE = 0.01


class CannotTrace(Exception):
    """A module cannot be traced. The message is half a sentence that follows "because"."""


def trace_module(
    module: nn.Module,
    loss: Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    *,
    samples: int,
    dtype: torch.dtype,
    buffer_dtype: torch.dtype | None = None,
) -> ModuleTrace:
    """Trace ``loss(module, batch)`` and its backward pass.

    Args:
        module: with parameters on any device, including meta. It must not be used afterwards.
        batch: tensors on the CPU, of which only shape and dtype are used.
        samples: of the batch.
        dtype: of parameters with floating point.
        buffer_dtype: of buffers with floating point; None: their own.

    Raises:
        CannotTrace: the module's code reads the value of a tensor, or fails.
    """
    parameters = tuple(
        ParameterSpec(name, tuple(parameter.shape), block_number(name))
        for name, parameter in module.named_parameters()
    )
    # Tensors that are neither parameters nor buffers become fake when they are used.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        replace_parameters(module, lambda parameter: _empty(parameter, dtype))
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = _empty(buffer, buffer_dtype or buffer.dtype)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_free_gradient)
        inputs = {name: _empty(tensor, tensor.dtype) for name, tensor in batch.items()}

    def measure() -> _Measured:
        with mode, _attention_without_dropout(), _unpacked_sequences():
            return _measure(module, lambda: loss(module, inputs), inputs)

    measured, traced = _measure_blocks(find_repeated_blocks(module), measure)
    return ModuleTrace(
        micro_batch=samples,
        parameters=parameters,
        saved_bytes=measured.saved_bytes,
        peak_bytes=measured.peak_bytes,
        forward_flops=dict(measured.forward_flops),
        backward_flops=dict(measured.backward_flops),
        forward_work=measured.forward_work,
        backward_work=measured.backward_work,
        recomputed_flops=measured.recomputed_flops,
        operators=measured.operators,
        traced_blocks=traced,
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """The figures of one trace; the attributes are those of ModuleTrace."""

    saved_bytes: int
    peak_bytes: int
    operators: int
    forward_flops: Counter[str]
    backward_flops: Counter[str]
    recomputed_flops: int
    forward_work: dict[str, OperatorWork]
    backward_work: dict[str, OperatorWork]

    def plus(self, other: _Measured, factor: int) -> _Measured:
        """``self + factor x other``."""
        return _Measured(
            self.saved_bytes + factor * other.saved_bytes,
            self.peak_bytes + factor * other.peak_bytes,
            self.operators + factor * other.operators,
            _plus(self.forward_flops, other.forward_flops, factor),
            _plus(self.backward_flops, other.backward_flops, factor),
            self.recomputed_flops + factor * other.recomputed_flops,
            _plus_work(self.forward_work, other.forward_work, factor),
            _plus_work(self.backward_work, other.backward_work, factor),
        )


def _plus(left: Counter[str], right: Counter[str], factor: int) -> Counter[str]:
    return Counter({name: left[name] + factor * right[name] for name in {*left, *right}})


def _plus_work(
    left: Mapping[str, OperatorWork], right: Mapping[str, OperatorWork], factor: int
) -> dict[str, OperatorWork]:
    """``left + factor x right``, without operators of which nothing is left."""
    every = {name: left.get(name, NO_WORK).plus(right.get(name, NO_WORK), factor) for name in {*left, *right}}
    return {name: work for name, work in every.items() if work != NO_WORK}


def _measure(
    module: nn.Module, loss: Callable[[], torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> _Measured:
    recorder = OperatorRecorder([*module.parameters(), *module.buffers()])
    for tensor in inputs.values():
        recorder.record(tensor)
    with recorder, explain_errors():
        result = loss()
        saved, forward, work = recorder.bytes, Counter(recorder.flops), dict(recorder.work)
        recorder.in_backward = True
        result.backward()
    return _Measured(
        saved_bytes=saved,
        peak_bytes=recorder.peak_bytes,
        operators=recorder.operators,
        forward_flops=forward,
        backward_flops=recorder.flops - forward,
        recomputed_flops=recorder.recomputed_flops,
        forward_work=work,
        backward_work=_plus_work(recorder.work, work, -1),
    )


def _free_gradient(parameter: torch.Tensor) -> None:
    """Free the gradient of a parameter as soon as it is complete: engines add it to their buffers, which the
    plan counts.
    """
    parameter.grad = None


# -- repeated blocks


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Blocks of one ``nn.ModuleList`` that do the same."""

    owner: nn.ModuleList
    blocks: tuple[nn.Module, ...]

    @contextmanager
    def shortened(self, count: int) -> Iterator[None]:
        """Leave the first ``count`` blocks."""
        whole = dict(self.owner._modules)
        try:
            self.owner._modules.clear()
            self.owner._modules.update(list(whole.items())[:count])
            yield
        finally:
            self.owner._modules.clear()
            self.owner._modules.update(whole)


def find_repeated_blocks(module: nn.Module) -> list[RepeatedBlocks]:
    """Return the lists of more than MOST_TRACED equal blocks that are not inside of another such list."""
    found, inside = [], set[nn.Module]()
    for part in module.modules():
        if part not in inside and isinstance(part, nn.ModuleList) and len(part) > MOST_TRACED:
            blocks = tuple(part)
            if _do_the_same(blocks):
                found.append(RepeatedBlocks(part, blocks))
                inside |= set(part.modules())
    return found


def _do_the_same(blocks: Sequence[nn.Module]) -> bool:
    """Return whether blocks have equal modules, parameters and settings, except for their own number."""
    first, *others = [_settings(block) for block in blocks]
    return all(
        other.keys() == first.keys()
        and all(
            value == first[key] or (_counts(value) and _counts(first[key]) and value - first[key] == number)
            for key, value in other.items()
        )
        for number, other in enumerate(others, 1)
    )


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _settings(block: nn.Module) -> dict[str, Any]:
    settings: dict[str, Any] = {
        f"{name} parameter": (parameter.shape, parameter.requires_grad)
        for name, parameter in block.named_parameters()
    }
    for path, part in block.named_modules():
        settings[path] = type(part)
        settings |= {
            f"{path}.{name}": value
            for name, value in vars(part).items()
            if value is None or isinstance(value, bool | int | float | str)
        }
    return settings


def _measure_blocks(
    repeated: Sequence[RepeatedBlocks], measure: Callable[[], _Measured]
) -> tuple[_Measured, tuple[int, ...] | None]:
    """Measure the module; as second result ``ModuleTrace.traced_blocks``.

    All numbers grow by the same with each block, once there are two. If a third depth is not on the line, or
    the module does not run with fewer blocks, all blocks are traced.
    """

    def at(counts: Sequence[int]) -> _Measured:
        with ExitStack() as stack:
            for each, count in zip(repeated, counts, strict=True):
                stack.enter_context(each.shortened(count))
            return measure()

    if not repeated:
        return measure(), None
    lists = range(len(repeated))
    try:
        base = at([BASE for _ in lists])
        growth = [at([BASE + (each == grown) for each in lists]).plus(base, -1) for grown in lists]
        check = at([CHECK for _ in lists])
    except CannotTrace:  # the reason may be that blocks are missing
        return measure(), None
    expected = found = base
    for grown, each in zip(growth, repeated, strict=True):
        expected = expected.plus(grown, CHECK - BASE)
        found = found.plus(grown, len(each.blocks) - BASE)
    even = all(abs(g.peak_bytes - g.saved_bytes) <= TOLERANCE * g.saved_bytes for g in growth)
    if check != expected or not even:
        return measure(), None
    return found, (BASE, BASE + 1, CHECK, sum(len(each.blocks) for each in repeated))


# -- what the module's code sees


def _empty(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the CPU of the same shape, in ``dtype`` if it has floating point."""
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kept, device="cpu")


@contextmanager
def _attention_without_dropout() -> Iterator[None]:
    """Run ``scaled_dot_product_attention`` without dropout.

    The fused kernel for CPUs has no dropout, so torch would store the whole matrix; those for GPUs store the
    random state only. A TorchFunctionMode would not see what the backward pass recomputes.
    """
    attend: Any = functional.scaled_dot_product_attention

    def without_dropout(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **named: Any,
    ) -> Any:
        return attend(query, key, value, attn_mask, 0.0, *rest, **named)

    functional.scaled_dot_product_attention = without_dropout
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attend


@contextmanager
def _unpacked_sequences() -> Iterator[None]:
    """Let models of transformers know that a row is one sequence, without reading its positions.

    transformers looks for positions that restart, and would create a mask for fake tensors, which it cannot
    read.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    search = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = search


@contextmanager
def explain_errors() -> Iterator[None]:
    """Convert errors of the module's code to CannotTrace, except for UserError."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        operator = str(getattr(error, "func", "an operator"))
        raise CannotTrace(
            f"its code depends on values of tensors ({operator} in {_location(error)})"
        ) from error
    except (CannotTrace, UserError):
        raise
    except Exception as error:  # of any type
        message = " ".join(str(error).split())
        raise CannotTrace(f"{_location(error)} raised {type(error).__name__}: {message:.200}") from error


def _location(error: Exception) -> str:
    """``file.py:12``, the innermost line that is neither torch's nor that of the trace."""
    torch_folder, traced = str(Path(torch.__file__).parent), (__file__, operator_recorder.__file__)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in traced and not frame.filename.startswith(torch_folder)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"
