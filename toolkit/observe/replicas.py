"""Compares what ranks should hold equal copies of, each ``monitor.replicas_every`` steps.

A graphics card that computes or keeps a wrong bit says nothing of it. Hashes are made on the device, in the order of its work and without
waiting for it; a thread waits for them and sends 160 bytes a set to rank 0, which names what differs. Nothing else of training is touched.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from toolkit.engine.hashing import hashes
from toolkit.engine.protocol import Engine
from toolkit.engine.rank_sync import FlagReduce
from toolkit.hooks import Hook, StepDone
from toolkit.monitor.alert import Alert
from toolkit.monitor.replica_hashes import (
    ReplicaDetector,
    TensorSet,
    hash_block,
    hash_row,
    pack_names,
    unpack_names,
)
from toolkit.observe.gather import Gather
from toolkit.plan.types import RunPlan

END_SECONDS = 5.0  # how long the end waits for the last comparison

Job = tuple[
    int, list[TensorSet], "_Pending", int, bytes | None
]  # step, sets, their hashes, sets of the rank that has most, new names


class Replicas(Hook):
    """
    Args:
        ask: over all ranks, at each comparison.
        gather: this rank's way to rank 0, of its own.
        every: steps between two comparisons.
        alert: takes differences, on rank 0, in the thread.
        tell: for trouble.
    """

    def __init__(
        self,
        plan: RunPlan,
        engine: Engine,
        all_reduce_flags: FlagReduce,
        gather: Gather,
        *,
        rank: int,
        every: int,
        alert: Callable[[Alert], None],
        tell: Callable[[str], None],
        end_seconds: float = END_SECONDS,
    ) -> None:
        self._plan, self._engine, self._all_reduce_flags, self._gather = (
            plan,
            engine,
            all_reduce_flags,
            gather,
        )
        self._rank, self._every, self._alert, self._tell = rank, every, alert, tell
        self._end_seconds = end_seconds
        self._sets: list[TensorSet] = []  # whose names rank 0 has
        self._verdicts = ReplicaDetector(plan.world.ranks_per_node)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="replicas", daemon=True)

    def on_step(self, done: StepDone) -> None:
        if done.step % self._every:
            return
        copies = self._engine.copies()
        sets = [TensorSet(one.what, one.ranks[0], tuple(one.tensors)) for one in copies]
        # Optimizers make their state in their first step: what there is may change.
        names = pack_names(sets, self._rank) if sets != self._sets else b""
        changed, slots, length = self._all_reduce_flags([sets != self._sets, len(sets), len(names)])
        self._sets = sets
        if not slots:
            return  # no rank holds what another one holds
        pending = _Pending(
            hashes([tensor for one in copies for tensor in one.tensors.values()], self._engine.device)
        )
        if self._thread.ident is None:
            self._thread.start()
        if self._thread.is_alive():
            self._jobs.put((done.step, sets, pending, slots, names.ljust(length, b"\0") if changed else None))

    def on_end(self, step: int) -> None:
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(self._end_seconds)

    def close(self) -> None:
        """Whatever ended the run. A thread that waits for a rank that is gone is left to the end of the process."""
        self._jobs.put(None)

    # ---- the thread

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._compare(*job)
        except Exception as error:  # noqa: BLE001  training goes on without comparisons
            if isinstance(error, RuntimeError) and self._rank != 0:
                return  # a rank is gone: that is everybody's trouble, and rank 0 tells it
            self._tell(f"copies are compared no more: {type(error).__name__}: {error}")

    def _compare(
        self, step: int, sets: Sequence[TensorSet], pending: _Pending, slots: int, names: bytes | None
    ) -> None:
        if names is not None:
            everyones = self._gather(np.frombuffer(names, dtype=np.uint8).copy())
            for rank, row in enumerate(() if everyones is None else everyones):
                self._verdicts.add_sets(unpack_names(row.tobytes(), rank))
        values = pending.wait()
        ends = np.cumsum([len(one.names) for one in sets], dtype=np.int64).tolist()
        rows = [
            hash_row(one, values[end - len(one.names) : end]) for one, end in zip(sets, ends, strict=True)
        ]
        blocks = self._gather(hash_block(rows, slots))
        for alert in () if blocks is None else self._verdicts.check(step, blocks):
            self._alert(alert)


class _Pending:
    """Hashes on their way from a device to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        self._passed: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._passed = torch.cuda.Event()
            self._passed.record()

    def wait(self) -> np.ndarray:
        if self._passed is not None:
            self._passed.synchronize()  # of the thread, not of training
        return self._values.numpy()
