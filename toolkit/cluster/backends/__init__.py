"""Where jobs are carried out: one module a place, each a :class:`~toolkit.cluster.job.Backend`."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from toolkit.cluster.job import Backend
from toolkit.config.cluster import ClusterBackend


def of(where: ClusterBackend) -> Backend:
    """The backend that ``cluster=`` names, imported when it is needed."""
    return cast(Backend, import_module(f"toolkit.cluster.backends.{where.value}"))
