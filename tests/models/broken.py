"""Models that cannot be trained, each for a different reason."""

from __future__ import annotations

import subprocess
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from nowhere import Unknown


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


class NoParameters(nn.Module):
    pass


class Unwell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.zeros(2, size=3)  # type: ignore[call-overload]  # a TypeError of its own


class Fine(nn.Module):
    def __init__(self, width: int, *, depth: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))


def no_module() -> int:
    return 3


def lying() -> nn.Module:
    return 3  # type: ignore[return-value]


def unannotated(command: str):  # type: ignore[no-untyped-def]
    subprocess.run(command, shell=True, check=True)


def unresolved() -> Unknown:
    raise AssertionError("it is not called")


def annotated(width: int) -> Fine:
    return Fine(width)


class NoModule:
    pass


partial_of_fine = partial(Fine, 2)
imported_elsewhere = torch
