"""``hydra/launcher=toolkit``: a point of a sweep is one distributed job, started outside its ranks.

Hydra finds this file because it lies in the namespace package ``hydra_plugins``; it is imported whenever Hydra composes, so it imports
nothing else. Where jobs are carried out is chosen by ``cluster=`` alone. What it does: toolkit/config/multirun.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

# A plain node: a dataclass looks its module up, which Hydra's scan for plugins registers only after it is executed.
NODE = {"_target_": "hydra_plugins.toolkit_launcher.ToolkitLauncher"}
ConfigStore.instance().store(group="hydra/launcher", name="toolkit", node=NODE, provider="toolkit")


class ToolkitLauncher(Launcher):
    """Hands the points that a sweeper made to whoever carries them out, whole batches at a time."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from toolkit.config.multirun import BatchRunner

        if not isinstance(
            task_function, BatchRunner
        ):  # another program, whose task is a function of one configuration
            raise HydraException(
                "hydra/launcher=toolkit carries out the sweeps of this toolkit's launch/train.py -m and no others"
            )
        self._carry_out = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        batch = [tuple(words) for words in job_overrides]
        return [_returned(words, value) for words, value in zip(batch, self._carry_out(batch), strict=True)]


def _returned(words: tuple[str, ...], value: float | Exception | None) -> JobReturn:
    """An exception is what a sweeper meets when it asks for the number."""
    returned = JobReturn(overrides=words)
    returned.return_value = value
    returned.status = JobStatus.FAILED if isinstance(value, Exception) else JobStatus.COMPLETED
    return returned
