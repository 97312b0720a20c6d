"""Compare state of which several ranks have copies, every ``monitor.replicas_every`` steps.

A GPU that computes or stores a wrong bit reports no error. Hashes are computed on the device, in the order
of its work and without waiting for it. A thread waits for them and sends 160 bytes a set to rank 0, which
names what differs.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from toolkit.engine.hashing import hash_tensors
from toolkit.engine.protocol import Engine
from toolkit.hooks import CompletedStep, Hook
from toolkit.monitor.alert import Alert
from toolkit.monitor.replica_hashes import (
    ReplicaDetector,
    TensorSet,
    hash_block,
    hash_row,
    pack_names,
    unpack_names,
)
from toolkit.observe.context import RankContext
from toolkit.observe.gather import Gather

log = logging.getLogger(__name__)

END_SECONDS = 5.0  # how long the end waits for the last comparison


class _Comparison(NamedTuple):
    step: int
    sets: list[TensorSet]
    hashes: PendingHashes
    slots: int  # sets of the rank that has most
    names: bytes | None  # if they changed on any rank


class ReplicaCheck(Hook):
    """
    Args:
        gather: gathers on rank 0; nothing else uses it.
        every: steps between two comparisons.
        alert: receives differences, on rank 0, in the thread.
    """

    def __init__(
        self,
        context: RankContext,
        engine: Engine,
        gather: Gather,
        *,
        every: int,
        alert: Callable[[Alert], None],
        end_seconds: float = END_SECONDS,
    ) -> None:
        self._context, self._engine, self._gather = context, engine, gather
        self._every, self._alert, self._end_seconds = every, alert, end_seconds
        self._sets: list[TensorSet] = []  # whose names rank 0 has
        self._verdicts = ReplicaDetector(context.plan.world.ranks_per_node)
        self._queue: queue.SimpleQueue[_Comparison | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)

    def on_step(self, completed: CompletedStep) -> None:
        if completed.step % self._every:
            return
        replica_sets = self._engine.replica_sets()
        sets = [TensorSet(copy.kind, copy.ranks[0], tuple(copy.tensors)) for copy in replica_sets]
        # Optimizers create their state in their first step, so the sets may change.
        names = pack_names(sets, self._context.rank) if sets != self._sets else b""
        flags = [sets != self._sets, len(sets), len(names)]
        changed, slots, length = self._context.all_reduce_flags(flags)
        self._sets = sets
        if not slots:
            return  # no rank has a copy of another rank's state
        tensors = [tensor for copy in replica_sets for tensor in copy.tensors.values()]
        pending = PendingHashes(hash_tensors(tensors, self._engine.device))
        if self._thread.ident is None:
            self._thread.start()
        if self._thread.is_alive():
            packed = names.ljust(length, b"\0") if changed else None
            self._queue.put(_Comparison(completed.step, sets, pending, slots, packed))

    def on_end(self, step: int) -> None:
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(self._end_seconds)

    def close(self) -> None:
        """Stop the thread. A thread that waits for a lost rank ends with the process."""
        self._queue.put(None)

    # ---- the background thread

    def _run(self) -> None:
        try:
            while (comparison := self._queue.get()) is not None:
                self._compare(comparison)
        except Exception as error:  # noqa: BLE001  training continues without comparisons
            if isinstance(error, RuntimeError) and self._context.rank != 0:
                return  # a rank is gone, which rank 0 reports
            log.warning(f"replicas are no longer compared: {type(error).__name__}: {error}")

    def _compare(self, comparison: _Comparison) -> None:
        if comparison.names is not None:
            gathered = self._gather(np.frombuffer(comparison.names, dtype=np.uint8).copy())
            for rank, row in enumerate(() if gathered is None else gathered):
                self._verdicts.add_sets(unpack_names(row.tobytes(), rank))
        values, sets = comparison.hashes.wait(), comparison.sets
        ends = np.cumsum([len(tensor_set.names) for tensor_set in sets], dtype=np.int64).tolist()
        rows = [
            hash_row(tensor_set, values[end - len(tensor_set.names) : end])
            for tensor_set, end in zip(sets, ends, strict=True)
        ]
        blocks = self._gather(hash_block(rows, comparison.slots))
        for alert in () if blocks is None else self._verdicts.check(comparison.step, blocks):
            self._alert(alert)


class PendingHashes:
    """Hashes that are being copied from a device to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> np.ndarray:
        if self._copied is not None:
            self._copied.synchronize()  # blocks this thread, not training
        return self._values.numpy()
