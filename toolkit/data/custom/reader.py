"""Read numbered samples of a map-style dataset, in this process or in worker processes."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader

from toolkit.data.custom.samples import (
    DatasetError,
    describe_failure,
    format_own_frames,
    preserved_generators,
    seed_generators,
)
from toolkit.user_code import UserObject, describe_source

Key = tuple[int, int]  # position in the run's order, sample number
READ_AHEAD = 2  # micro-batches for each worker


class SampleReader:
    """Reads lists of samples of a map-style dataset, in order.

    Worker processes are spawned instead of forked: a process with the threads of gloo and NCCL cannot be
    forked safely. They ignore the signals that ask a run to stop, because the step under way still needs
    their samples, and end with this process.

    Args:
        length: of the dataset when the run started; a dataset that changes is refused.
        workers: 0 reads in this process when the samples are needed, with the state of the global random
            generators preserved.
    """

    def __init__(self, dataset: Any, given: UserObject, length: int, *, seed: int, workers: int) -> None:
        self._dataset = _NumberedSamples(dataset, given, length, seed)
        self._seed, self._workers = seed, workers
        self._processes: list[Any] = []
        self._iterator: Iterator[bytes] | None = None

    def read(self, keys: Sequence[Key]) -> list[Any]:
        """Read samples in this process."""
        with preserved_generators():
            return self._dataset.read(keys)

    def batches(self, batches: Iterable[list[Key]]) -> Iterator[list[Any]]:
        """Yield the samples of each list of keys."""
        if not self._workers:
            for keys in batches:
                yield self.read(keys)
            return
        dataset: Any = self._dataset  # torch calls its __getitems__ with the keys that the sampler yields
        unchanged: Any = _unchanged
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=self._workers,
            collate_fn=unchanged,
            worker_init_fn=_start_worker,
            multiprocessing_context="spawn",
            prefetch_factor=READ_AHEAD,
            generator=torch.Generator().manual_seed(self._seed),  # otherwise it draws from the global one
        )
        before = set(multiprocessing.active_children())
        self._iterator = iter(loader)
        self._processes = [child for child in multiprocessing.active_children() if child not in before]
        # Runs before multiprocessing's own exit function, whose signal the workers ignore.
        atexit.register(self.close)
        while self._iterator is not None:
            samples = pickle.loads(next(self._iterator))
            if isinstance(samples, _WorkerError):
                error = DatasetError(samples.message)
                error.add_note(samples.trace)
                raise error
            yield samples

    def close(self) -> None:
        """End the worker processes."""
        atexit.unregister(self.close)
        self._iterator = None  # torch ends the workers that are not inside the user's code
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []


class _WorkerError:
    """Returned by a worker instead of samples: torch would wrap an exception in a longer traceback."""

    def __init__(self, message: str, trace: str) -> None:
        self.message, self.trace = message, trace


class _NumberedSamples:
    """The user's dataset, addressed by (position, sample number)."""

    def __init__(self, dataset: Any, given: UserObject, length: int, seed: int) -> None:
        self._dataset, self._given, self._length, self._seed = dataset, given, length, seed

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, keys: Sequence[Key]) -> bytes:
        """Called by torch in a worker. Samples return as one string of bytes: a shared-memory file for each
        tensor would exhaust the file descriptors of the process."""
        try:
            samples: Any = self.read(keys)
            return pickle_samples(samples)
        except DatasetError as error:
            cause = error.__cause__ if error.__cause__ is not None else error
            return pickle_samples(_WorkerError(str(error), format_own_frames(cause)))
        except Exception as error:  # noqa: BLE001  the training process raises it
            doing = "sending samples to the training process"
            message = describe_failure(self._given, self._dataset, error, doing)
            return pickle_samples(_WorkerError(message, format_own_frames(error)))

    def read(self, keys: Sequence[Key]) -> list[Any]:
        """Read the samples of ``keys``. Raises DatasetError if the user's code fails."""
        given, dataset = self._given, self._dataset
        doing = "asked for its length"
        try:
            length = len(dataset)
            if length != self._length:
                raise DatasetError(
                    f"{given.key}.target={given.target} ({describe_source(dataset)}) had {self._length} "
                    f"samples when the run started, and has {length} now; the length of a dataset must not "
                    "change"
                )
            samples = []
            for position, number in keys:
                doing = f"reading sample {number}"
                seed_generators(self._seed, position)
                samples.append(dataset[number])
        except DatasetError:
            raise
        except Exception as error:
            raise DatasetError(describe_failure(given, dataset, error, doing)) from error
        return samples


class _SamplePickler(pickle.Pickler):
    """Pickles tensors as arrays, which takes a tenth of the time of torch's own format."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and not obj.requires_grad:
            try:
                return torch.from_numpy, (obj.numpy(),)
            except (TypeError, RuntimeError):  # a dtype that NumPy lacks, or a sparse tensor
                return NotImplemented
        return NotImplemented


def pickle_samples(samples: Any) -> bytes:
    """Pickle samples. Equal samples give equal bytes."""
    file = io.BytesIO()
    _SamplePickler(file, protocol=5).dump(samples)
    return file.getvalue()


def _unchanged(answer: bytes) -> bytes:
    return answer


def _start_worker(number: int) -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    wait([parent.sentinel])
    os._exit(1)
