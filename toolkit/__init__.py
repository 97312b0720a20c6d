"""One run description, DeepSpeed or Megatron-core, any layout.

    from toolkit import load_config, plan, train

    config = load_config("+exp=quickstart", "train.steps=20")
    result = train(config)

Importing this package is cheap: the names below are imported at first use, because most need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from toolkit.api import TrainResult, load_config, plan, train
    from toolkit.hooks import CompletedStep, Hook, HookContext
    from toolkit.monitor.sink import Sink
    from toolkit.train.metrics import Metric
    from toolkit.train.task import NextTokenTask, Task, TextTask

# The Python interface and the base classes of the user's own code, with their modules.
_EXPORTS = {
    "CompletedStep": "toolkit.hooks",
    "Hook": "toolkit.hooks",
    "HookContext": "toolkit.hooks",
    "Metric": "toolkit.train.metrics",
    "NextTokenTask": "toolkit.train.task",
    "Sink": "toolkit.monitor.sink",
    "Task": "toolkit.train.task",
    "TextTask": "toolkit.train.task",
    "TrainResult": "toolkit.api",
    "load_config": "toolkit.api",
}
_CALLABLE = ("plan", "train")  # packages that are also functions: toolkit/callable_package.py
__all__ = [
    "CompletedStep",
    "Hook",
    "HookContext",
    "Metric",
    "NextTokenTask",
    "Sink",
    "Task",
    "TextTask",
    "TrainResult",
    "__version__",
    "load_config",
    "plan",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if name in _CALLABLE:
        return import_module(f"toolkit.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
