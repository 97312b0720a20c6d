"""The run that is looked at: what the user's words come to on this machine, or what another process has made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.cluster.doctor.gpus import DRIVER_HANGS_REMEDY
from toolkit.cluster.doctor.types import RunRequirements, compute_requirements
from toolkit.cluster.environment import Launch, check_startable, detect_world
from toolkit.cluster.machine_info import MachineInfo
from toolkit.cluster.attempt_spec import AttemptSpec, load_config
from toolkit.config.schema import RunConfig
from toolkit.errors import Problem, UserError
from toolkit.plan.types import Device, RunPlan, World


@dataclass(frozen=True, slots=True)
class DoctorTarget:
    """``plan`` is None where the run breaks rules; ``problems`` are these, else the plan's warnings."""

    config: RunConfig
    world: World
    plan: RunPlan | None
    problems: tuple[Problem, ...]

    def start(self) -> AttemptSpec:
        """For other ranks, which make the same of it."""
        from toolkit.config.compose import to_yaml

        return AttemptSpec(to_yaml(self.config), self.world, attempt=0)

    def need(self, launch: Launch) -> RunRequirements:
        serves = launch.rank == 0 and not launch.agent_store  # else the launcher does
        return compute_requirements(
            self.config,
            self.world,
            self.plan,
            address=launch.address if launch.ranks > 1 else None,
            serves_port=launch.port if serves else None,
        )


def target_from_spec(start: AttemptSpec) -> DoctorTarget:
    from toolkit.config.compose import from_yaml

    return _planned(from_yaml(start.yaml), start.world)


def target_from_overrides(words: Sequence[str], launch: Launch, machine: MachineInfo | None, silence: str) -> DoctorTarget:
    """
    Args:
        machine: None: it does not say what it has, and ``silence`` is why. Then there is no plan.

    Raises:
        UserError: a mistake in the words; or what they describe is not what is here.
    """
    config = load_config(words, launch)
    if machine is None:
        world = World(ranks=launch.ranks, ranks_per_node=launch.ranks_per_node, device=Device.CUDA)
        return DoctorTarget(
            config,
            world,
            None,
            (Problem("the machine", f"NVML: {silence}", "what GPUs there are decides the plan", DRIVER_HANGS_REMEDY),),
        )
    check_startable(
        config.cluster, launch, replace(machine, torch_has_cuda=True)
    )  # a torch without CUDA is a check of its own
    return _planned(config, detect_world(config.cluster, launch, machine))


def _planned(config: RunConfig, world: World) -> DoctorTarget:
    from toolkit.plan import make_plan
    from toolkit.plan.target import check_target

    try:
        plan = make_plan(config, world)
        check_target(config.model)
    except UserError as error:
        return DoctorTarget(config, world, None, error.problems)
    return DoctorTarget(config, world, plan, plan.warnings)
