"""Job backends: one module each, which implements :class:`~toolkit.cluster.jobs.job.Backend`."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from toolkit.cluster.jobs.job import Backend
from toolkit.config.cluster import ClusterBackend


def get_backend(where: ClusterBackend) -> Backend:
    """Import and return the backend that ``cluster=`` names."""
    return cast(Backend, import_module(f"toolkit.cluster.jobs.backends.{where.value}"))
