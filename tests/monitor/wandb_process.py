"""A W&B sink without network access."""

from __future__ import annotations

import socket
from typing import Any

from toolkit.monitor.sinks.wandb import WandbSink

CONNECT = socket.socket.connect


def _refuse(self: socket.socket, address: Any, *rest: Any) -> Any:
    assert self.family == socket.AF_UNIX, f"network: {address}"
    return CONNECT(self, address, *rest)


def without_network(**arguments: Any) -> WandbSink:
    socket.socket.connect = _refuse  # type: ignore[method-assign,assignment]
    return WandbSink(**arguments)
