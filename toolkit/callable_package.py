"""Packages that are also functions of the Python interface.

``from toolkit import plan, train`` gives functions to a user, and ``toolkit.plan`` and ``toolkit.train`` are
packages. Importing a package binds its name in ``toolkit``, whatever had it before, so the packages
themselves are callable.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package ``toolkit.NAME`` that calls ``toolkit.api.NAME``."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module("toolkit.api"), name)(*arguments, **keywords)


def make_callable(name: str) -> None:
    """Make the package ``name``, which is being imported, a :class:`CallablePackage`."""
    sys.modules[name].__class__ = CallablePackage
