"""A dataset of the user's own code: ``data=custom data.target=my.package.Dataset``."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import pickle
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.config.schema import RunConfig
from toolkit.data.custom.iterable_style import IterableStream, iterable_eval_batches
from toolkit.data.custom.map_style import MapStream, map_eval_batches
from toolkit.data.custom.reader import SampleReader, pickle_samples
from toolkit.data.custom.samples import dataset_code
from toolkit.data.evaluation import EvalSet
from toolkit.data.kinds.dataset import all_gather_states
from toolkit.data.registry import DataKind, RunData
from toolkit.errors import Problem, Severity
from toolkit.plan.types import BatchPlan
from toolkit.progress import Progress
from toolkit.user_code import UserObject, check_arguments, describe_source, load_target, user_code

log = logging.getLogger(__name__)

TRAIN = "train"  # the value of the argument ``split`` for the training data
RULE = (
    "data.target is a class with __len__ and __getitem__, or with __iter__, or a function annotated to "
    "return one"
)


class _Factory:
    """Builds the dataset of a split, after checking what ``data.target`` names.

    Attributes:
        map_style: whether samples have numbers; otherwise the dataset is iterated over.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.data.target is not None, "a rule refuses data=custom without data.target"
        self.given = UserObject("data", config.data.target, config.data.arguments)
        self._factory = load_target(self.given)
        self.map_style = self._check_kind()
        accepts = self._parameters()
        self._splits = "split" in accepts
        self.shared = not self.map_style and {"rank", "world_size"} <= accepts
        if config.eval.every and not self._splits:
            raise self.given.problem(
                f"{describe_source(self._factory)} has no argument split, eval.every={config.eval.every}",
                "an evaluation set is data.target called with split=NAME for each NAME of eval.sets, "
                f"the training data with split={TRAIN}",
                "add the argument split to it, or write eval.every=0",
            )
        check_arguments(self._with_split(TRAIN, 0, 1), self._factory)

    def build(self, split: str, rank: int = 0, world_size: int = 1) -> Any:
        """Build the dataset of one split, or for ``shared`` the share of one data rank."""
        with user_code("data", self._factory):
            return self._factory(**self._with_split(split, rank, world_size).arguments)

    def _with_split(self, split: str, rank: int, world_size: int) -> UserObject:
        own: dict[str, Any] = {"split": split} if self._splits else {}
        if self.shared:
            own |= {"rank": rank, "world_size": world_size}
        if twice := own.keys() & self.given.arguments.keys():
            raise self.given.problem(
                f"data.arguments has {', '.join(sorted(twice))}",
                "split, rank and world_size are set for each evaluation set and each rank",
                f"leave out data.arguments.{min(twice)}",
            )
        return replace(self.given, arguments={**self.given.arguments, **own})

    def _check_kind(self) -> bool:
        factory, given = self._factory, self.given
        kind: type | None
        if inspect.isclass(factory):
            kind, seen, remedy = factory, f"the class {factory.__name__} has neither", "define them"
        elif inspect.isfunction(factory):
            # A configuration may come from somebody else, and calling any function means running any code.
            kind = _returned_class(factory)
            seen = f"the function {factory.__name__} is not annotated to return a dataset"
            remedy = f"annotate it: def {factory.__name__}(...) -> torch.utils.data.Dataset"
            if kind is not None and kind.__name__ == "Dataset" and kind.__module__.startswith("torch."):
                return True  # torch's base class of map-style datasets has no __len__
        else:
            raise given.problem(f"it is a {type(factory).__name__}", RULE, "name a class or function")
        if kind is not None:
            iterable = any(base.__name__ == "IterableDataset" for base in kind.__mro__)
            if not iterable and hasattr(kind, "__len__") and hasattr(kind, "__getitem__"):
                return True
            if hasattr(kind, "__iter__"):
                return False
        raise given.problem(f"{seen} ({describe_source(factory)})", RULE, remedy)

    def _parameters(self) -> set[str]:
        try:
            return set(inspect.signature(self._factory).parameters)
        except (TypeError, ValueError):  # implemented in C without a signature
            return set()


def _returned_class(function: Callable[..., Any]) -> type | None:
    try:
        returned = typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):  # a name imported for type checkers only
        return None
    return returned if inspect.isclass(returned) else None


def _prepare(config: RunConfig, vocab_size: int | None, progress: Progress) -> str:
    factory = _Factory(config)
    for split in (TRAIN, *(config.eval.sets if config.eval.every else [])):
        dataset = factory.build(split)
        if factory.map_style:
            _check_map_dataset(config, factory.given, dataset, split)
    if not factory.map_style and config.data.workers:
        raise factory.given.problem(
            f"data.workers={config.data.workers}, and it is iterable-style",
            "worker processes read map-style datasets: with __len__ and __getitem__",
            "write data.workers=0",
        )
    if not factory.map_style and (asked := config.train.rollback_keys):
        raise factory.given.problem(
            f"{', '.join(f'{key}=rollback' for key in asked)}, and it is iterable-style",
            "a rollback skips samples by their positions, which map-style datasets have: __len__ and "
            "__getitem__",
            f"write {' '.join(asked.values())}, or define these methods",
        )
    return factory.given.target


def _check_map_dataset(config: RunConfig, given: UserObject, dataset: Any, split: str) -> None:
    length = _length(given, dataset)
    least = config.train.global_batch if split == TRAIN else 1
    if length < least:
        raise given.problem(
            f"{length} samples in split {split}, train.global_batch={config.train.global_batch}",
            "an epoch has at least the samples of one global batch, and an evaluation set has samples",
            f"write train.global_batch={length} or less, or give it more samples"
            if split == TRAIN and length
            else "give it samples",
        )
    if split != TRAIN:
        return
    if config.data.workers:
        try:
            pickle.Pickler(_NullFile(), protocol=5).dump(dataset)
        except Exception as error:
            raise given.problem(
                f"{describe_source(dataset)} cannot be pickled: {type(error).__name__}: {error}",
                f"data.workers={config.data.workers} worker processes get a pickled copy of the dataset",
                "open files and connections in __getitem__ when they are first needed, use functions of a "
                "module instead of lambdas, or write data.workers=0",
            ) from error
    reader = SampleReader(dataset, given, length, seed=config.data.shuffle_seed, workers=0)
    first, again = (_pickle_or_none(reader.read([(0, 0)])) for _ in range(2))
    if first is None and config.data.workers:
        raise given.problem(
            f"sample 0 of {describe_source(dataset)} cannot be pickled",
            f"data.workers={config.data.workers} worker processes send pickled samples",
            "return tensors, arrays, numbers, text, or lists and dictionaries of these; or write "
            "data.workers=0",
        )
    if first != again:
        log.warning(
            str(
                Problem(
                    "data.target",
                    f"data.target={given.target}: sample 0, read twice, has two values "
                    f"({describe_source(dataset)})",
                    "a sample depends on its number and on the global generators of random, numpy and torch, "
                    "which are seeded before each sample",
                    "draw random numbers from these generators; otherwise a resumed run differs from one "
                    "that was never stopped",
                    Severity.WARNING,
                )
            )
        )


class _NullFile:
    """Takes a large pickle without storing it."""

    def write(self, data: bytes) -> int:
        return len(data)


def _pickle_or_none(samples: Any) -> bytes | None:
    try:
        return pickle_samples(samples)
    except Exception:  # noqa: BLE001  samples need not be picklable without workers
        return None


def _length(given: UserObject, dataset: Any) -> int:
    with dataset_code(given, dataset, "asked for its length"):
        return len(dataset)


def _identity(given: UserObject, dataset: Any, split: str) -> dict[str, str | int]:
    """Return what identifies the samples of a dataset: class, arguments, and its own ``fingerprint()``."""
    arguments = json.dumps(dict(given.arguments), sort_keys=True, default=str)
    found: dict[str, str | int] = {
        "dataset": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
        "arguments": hashlib.sha256(arguments.encode()).hexdigest()[:16],
        "split": split,
    }
    if callable(fingerprint := getattr(dataset, "fingerprint", None)):
        with dataset_code(given, dataset, "asked for its fingerprint"):
            found["data"] = str(fingerprint())
    return found


def _open(config: RunConfig, batch: BatchPlan, data_rank: int, folder: str) -> RunData:
    factory = _Factory(config)
    open_kind = _open_map if factory.map_style else _open_iterable
    return open_kind(config, factory, batch, data_rank)


def _open_map(config: RunConfig, factory: _Factory, batch: BatchPlan, data_rank: int) -> RunData:
    given, seed = factory.given, config.data.shuffle_seed

    def open_reader(split: str, workers: int) -> tuple[SampleReader, int, dict[str, str | int]]:
        dataset = factory.build(split)
        length = _length(given, dataset)
        reader = SampleReader(dataset, given, length, seed=seed, workers=workers)
        return reader, length, {**_identity(given, dataset, split), "length": length}

    reader, length, identity = open_reader(TRAIN, config.data.workers)
    sets = {}
    for name in config.eval.sets if config.eval.every else []:
        eval_reader, eval_length, eval_identity = open_reader(name, 0)
        batches: Callable[[], Iterator[Any]] = partial(
            map_eval_batches, eval_reader, eval_length, config.eval.batches, batch, data_rank
        )
        sets[name] = EvalSet(json.dumps(eval_identity, sort_keys=True), batches)
    stream = MapStream(reader, length, identity, seed=seed, batch=batch, data_rank=data_rank)
    return RunData(stream, sets, tokenizer=None, unigram=lambda: None)


def _open_iterable(config: RunConfig, factory: _Factory, batch: BatchPlan, data_rank: int) -> RunData:
    given, seed = factory.given, config.data.shuffle_seed
    dataset = factory.build(TRAIN, data_rank, batch.data_parallel)
    stream = IterableStream(
        dataset,
        given,
        _identity(given, dataset, TRAIN),
        shared=factory.shared,
        seed=seed,
        batch=batch,
        data_rank=data_rank,
        gather=all_gather_states,
    )
    sets = {}
    for name in config.eval.sets if config.eval.every else []:
        evaluated = factory.build(name)
        batches: Callable[[], Iterator[Any]] = partial(
            iterable_eval_batches, evaluated, given, seed, config.eval.batches, batch, data_rank
        )
        sets[name] = EvalSet(json.dumps(_identity(given, evaluated, name), sort_keys=True), batches)
    return RunData(stream, sets, tokenizer=None, unigram=lambda: None)


CUSTOM = DataKind(_prepare, _open)
