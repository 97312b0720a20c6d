"""Read samples of the user's dataset: seed the random generators for each sample, and name what fails."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash

from toolkit.errors import ConfigError
from toolkit.user_code import UserObject, describe_source, error_location


class Samples(list[Any]):
    """The samples of one micro-batch, as the user's dataset returned them.

    Attributes:
        real: how many of them count. All ranks process micro-batches of one size, so the last batch of an
            evaluation repeats a sample to fill up.
    """

    def __init__(self, samples: Sequence[Any], real: int | None = None) -> None:
        super().__init__(samples)
        self.real = len(samples) if real is None else real


class DatasetError(RuntimeError):
    """The user's dataset failed. The message names its source, the sample, and the line that raised."""


def seed_generators(seed: int, position: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch on the CPU by a position in the run's order.

    So a random augmentation gives the same sample for any number of ranks and workers, and after a resume.
    """
    number = xxhash.xxh3_64_intdigest(f"{seed}/{position}".encode())
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the state of the same generators at the end."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)


def describe_failure(given: UserObject, dataset: object, error: Exception, doing: str) -> str:
    """Describe an exception of the user's dataset in one line."""
    return (
        f"{given.key}.target={given.target} ({describe_source(dataset)}) raised {type(error).__name__} in "
        f"{error_location(error)} when {doing}: {error}"
    )


def format_own_frames(error: BaseException) -> str:
    """Format the frames of ``error`` that follow those of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if "toolkit/data/custom/" not in frame.filename), 0)
    lines = [*traceback.format_list(frames[first:]), *traceback.format_exception_only(error)]
    return "Traceback in the dataset (most recent call last):\n" + "".join(lines)


@contextmanager
def dataset_code(given: UserObject, dataset: object, doing: str) -> Iterator[None]:
    """Name an exception of the user's dataset. ``doing``: what was asked of it, such as ``reading``."""
    try:
        yield
    except (ConfigError, DatasetError):
        raise
    except Exception as error:
        raise DatasetError(describe_failure(given, dataset, error, doing)) from error


def pad_samples(samples: Sequence[Any], size: int, filler: Any) -> Samples:
    """Return the samples of one micro-batch of an evaluation, filled up to ``size``."""
    return Samples([*samples, *[filler] * (size - len(samples))], real=len(samples))


Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]
