"""``hydra/launcher=toolkit``: run each point of a sweep as one distributed job.

Hydra finds this file in the namespace package ``hydra_plugins`` and imports it whenever it composes, so
imports are minimal. ``cluster=`` selects where jobs run. The implementation is in toolkit/config/multirun.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

# A plain node: a dataclass would look up its module, which Hydra's plugin scan registers only after executing
# it.
NODE = {"_target_": "hydra_plugins.toolkit_launcher.ToolkitLauncher"}
ConfigStore.instance().store(group="hydra/launcher", name="toolkit", node=NODE, provider="toolkit")


class ToolkitLauncher(Launcher):
    """Passes the points of a sweeper, in whole batches, to the function that runs them."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from toolkit.config.multirun import BatchRunner

        # another program, whose task takes a single configuration
        if not isinstance(task_function, BatchRunner):
            raise HydraException("hydra/launcher=toolkit runs only the sweeps of this toolkit: dmt train -m")
        self._carry_out = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        batch = [tuple(words) for words in job_overrides]
        return [_returned(words, value) for words, value in zip(batch, self._carry_out(batch), strict=True)]


def _returned(words: tuple[str, ...], value: float | Exception | None) -> JobReturn:
    """Return the result of a point; an exception is raised when the sweeper reads the value."""
    returned = JobReturn(overrides=words)
    returned.return_value = value
    returned.status = JobStatus.FAILED if isinstance(value, Exception) else JobStatus.COMPLETED
    return returned
