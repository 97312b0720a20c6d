"""Random initial weights as a checkpoint reader.

They are a pure function of seed and parameter name, equal to the bit in every layout and on every device. A
rank draws its shards module by module, in several threads, and never stores more than a few chunks of a
tensor (random_fill.py). An initializer that does more than to draw normal distributions and constants is run
on one whole module at a time.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from toolkit.checkpoint.shard import WEIGHT, Shard, TensorInfo, TensorKey
from toolkit.errors import CheckpointError, Problem
from toolkit.models.build import build_model
from toolkit.models.hugging_face import build_with_random_weights
from toolkit.models.random_fill import Fill, draw, record_fills
from toolkit.models.user_model import build_user_module
from toolkit.plan.types import RunPlan
from toolkit.progress import duration, quantity, report_progress

THREADED_NUMEL = 2**22  # numbers from which threads are worth their start
LOG_SECONDS = 10.0  # between two lines of progress

log = logging.getLogger(__name__)


class InitialWeights:
    """A ``Reader`` of fp32 weights without scalars.

    Args:
        build: builds the whole module of a model without a family with its weights on the CPU, in place of
            its constructor.
    """

    scalars: Mapping[str, object] = {}

    def __init__(self, plan: RunPlan, build: Callable[[RunPlan], nn.Module] | None = None) -> None:
        self._plan = plan
        self._build = build or (_module_of_plan if plan.config.model.target else build_with_random_weights)

    @cached_property
    def tensors(self) -> Mapping[TensorKey, TensorInfo]:
        if self._plan.parameters:
            shapes = {spec.name: spec.shape for spec in self._plan.parameters}
        else:
            shapes = {name: tuple(weight.shape) for name, weight in self._module_weights.items()}
        return {TensorKey(WEIGHT, name): TensorInfo("float32", shape) for name, shape in shapes.items()}

    @torch.no_grad()
    def read(self, shards: Sequence[Shard]) -> None:
        shards_by_name: dict[str, list[Shard]] = {}
        for shard in shards:
            info = self.tensors.get(shard.key)
            if info is None or info.shape != shard.global_shape:
                has = "nothing of that name" if info is None else f"shape {list(info.shape)}"
                raise CheckpointError(
                    Problem(
                        "model",
                        f"{shard.key} of shape {list(shard.global_shape)}; the initial weights have {has}",
                        "the model in memory has the parameters of its description",
                        "report this: it is a defect",
                    )
                )
            shards_by_name.setdefault(shard.key.name, []).append(shard)
        if self._plan.shape is None:
            _copy(self._module_weights, shards_by_name)
            return
        drawn, rest = self._record(shards_by_name)
        _draw_in_threads(drawn)
        for path in rest:
            module = self._skeleton.get_submodule(path)
            with _materialize(module), torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed(path))
                self._initialize(path, module)
                own = module.named_parameters(recurse=False)
                _copy({_join(path, name): weight for name, weight in own}, shards_by_name)
            report_progress(f"initializing {path}")

    def _record(self, shards_by_name: Mapping[str, list[Shard]]) -> tuple[list[ModuleDraw], list[str]]:
        """Return the modules with shards: those that can be drawn in parts, and the paths of the others."""
        drawn, rest = [], []
        for path, module in self._skeleton.named_modules():
            names = {name: _join(path, name) for name in module._parameters}
            shards = {name: shards_by_name[whole] for name, whole in names.items() if whole in shards_by_name}
            if shards:
                own = dict(module.named_parameters(recurse=False))
                fills = record_fills(own, partial(self._initialize, path, module))
                if fills is None:
                    rest.append(path)
                else:
                    drawn.append(ModuleDraw(path, fills, shards, self._seed(path)))
        return drawn, rest

    @cached_property
    def _module_weights(self) -> dict[str, torch.Tensor]:
        """The weights without a family: the whole model is built, as only its constructor knows them."""
        return {name: parameter.detach() for name, parameter in self._build(self._plan).named_parameters()}

    @cached_property
    def _skeleton(self) -> Any:
        return build_model(self._plan, "cpu", meta=True)

    def _initialize(self, path: str, module: nn.Module) -> None:
        """Initialize a module as transformers does: first the module, then its parents, which may change it.

        gpt2, for example, rescales the projections into the residual stream from outside. The parents' other
        parts are on meta, so initializing them has no effect.
        """
        self._skeleton._init_weights(module)
        while path:
            path = path.rpartition(".")[0]
            self._skeleton._init_weights(self._skeleton.get_submodule(path))

    def _seed(self, path: str) -> int:
        text = f"{self._plan.config.train.seed}/{path}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True, slots=True)
class ModuleDraw:
    """A module whose parameters are drawn in parts: ``shards`` by the names of its parameters."""

    path: str
    fills: Sequence[Fill]
    shards: Mapping[str, Sequence[Shard]]
    seed: int

    @property
    def numel(self) -> int:
        return sum(fill.numel for fill in self.fills if fill.std is not None)


def _draw_in_threads(modules: Sequence[ModuleDraw]) -> None:
    """Draw the modules, the largest first: torch draws a tensor with one thread, without Python's lock."""
    progress = DrawProgress(sum(module.numel for module in modules))

    def work(module: ModuleDraw) -> None:
        draw(module.fills, module.shards, module.seed, partial(progress.advance, module.path))

    modules = sorted(modules, key=lambda module: -module.numel)
    threads = min(torch.get_num_threads(), len(modules))
    if threads < 2 or progress.total < THREADED_NUMEL:
        for module in modules:
            work(module)
        return
    # In the threads torch's operations use one thread each; the setting is of the process and restored.
    inner = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "initial-weights", torch.set_num_threads, (1,))
    try:
        for future in as_completed([pool.submit(work, module) for module in modules]):
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(inner)


class DrawProgress:
    """Log how far the weights are, and report each chunk to who watches for hangs.

    Args:
        total: numbers to draw or to skip; ranks need fewer if their shards end earlier.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self._done, self._clock = 0, clock
        self._lock = threading.Lock()
        self._start = self._logged = clock()

    def advance(self, path: str, count: int) -> None:
        report_progress(f"initializing {path}")
        with self._lock:
            self._done += count
            now = self._clock()
            if now - self._logged < LOG_SECONDS:
                return
            self._logged = now
            speed = self._done / (now - self._start)
            done, total, left = self._done, self.total, duration((self.total - self._done) / speed)
        log.info(
            f"initial weights: {quantity(done, 'numbers')} of {quantity(total, 'numbers')} at "
            f"{quantity(speed, 'numbers')}/s, {left} left ({path})"
        )


def _module_of_plan(plan: RunPlan) -> nn.Module:
    return build_user_module(plan.config.model, plan.config.train.seed)


@contextmanager
def _materialize(module: nn.Module) -> Iterator[None]:
    """Give the module's own parameters memory inside the context."""
    meta = dict(module._parameters)
    for name, parameter in meta.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32))
    try:
        yield
    finally:
        module._parameters.update(meta)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _copy(weights: Mapping[str, torch.Tensor], shards_by_name: Mapping[str, Sequence[Shard]]) -> None:
    for name, weight in weights.items():
        for shard in shards_by_name.get(name, ()):
            index = tuple(
                slice(low, low + size) for low, size in zip(shard.box.offset, shard.box.shape, strict=True)
            )
            shard.data.copy_(weight[index])
