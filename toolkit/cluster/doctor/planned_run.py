"""The run that the doctor checks, composed from the user's arguments or received from another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.cluster.attempt.attempt_spec import AttemptSpec, load_config
from toolkit.cluster.doctor.gpus import DRIVER_HANGS_REMEDY
from toolkit.cluster.doctor.types import RunRequirements, compute_requirements
from toolkit.cluster.world.environment import Launch, check_startable, detect_world
from toolkit.cluster.world.machine_info import MachineInfo
from toolkit.config.schema import RunConfig
from toolkit.errors import Problem, UserError
from toolkit.plan.types import Device, RunPlan, World


@dataclass(frozen=True, slots=True)
class DoctorTarget:
    """The run that the doctor checks, on the machines of ``world``.

    Attributes:
        plan: None if the run breaks rules, or if the GPU driver does not respond.
        problems: why there is no plan, otherwise the plan's warnings.
    """

    config: RunConfig
    world: World
    plan: RunPlan | None
    problems: tuple[Problem, ...]

    def spec(self) -> AttemptSpec:
        """Return the spec from which other ranks create the same target."""
        from toolkit.config.compose import to_yaml

        return AttemptSpec(to_yaml(self.config), self.world, attempt=0)

    def requirements(self, launch: Launch) -> RunRequirements:
        serves = launch.rank == 0 and not launch.agent_store  # otherwise the launcher serves it
        return compute_requirements(
            self.config,
            self.world,
            self.plan,
            address=launch.address if launch.ranks > 1 else None,
            serves_port=launch.port if serves else None,
        )


def target_from_spec(spec: AttemptSpec) -> DoctorTarget:
    from toolkit.config.compose import from_yaml

    return _planned(from_yaml(spec.yaml), spec.world)


def target_from_overrides(
    overrides: Sequence[str], launch: Launch, machine: MachineInfo | None, nvml_error: str
) -> DoctorTarget:
    """Compose and plan the run on this machine.

    Args:
        machine: None: the driver did not respond, for the reason ``nvml_error``; then there is no plan.

    Raises:
        UserError: a mistake in the arguments, or they do not fit this machine.
    """
    config = load_config(overrides, launch)
    if machine is None:
        world = World(ranks=launch.ranks, ranks_per_node=launch.ranks_per_node, device=Device.CUDA)
        return DoctorTarget(
            config,
            world,
            None,
            (
                Problem(
                    "the machine", f"NVML: {nvml_error}", "the plan depends on the GPUs", DRIVER_HANGS_REMEDY
                ),
            ),
        )
    # a torch without CUDA is a separate check
    check_startable(config.cluster, launch, replace(machine, torch_has_cuda=True))
    return _planned(config, detect_world(config.cluster, launch, machine))


def _planned(config: RunConfig, world: World) -> DoctorTarget:
    from toolkit.plan import make_plan
    from toolkit.plan.schedule import check_schedule
    from toolkit.user_code import check_user_code

    try:
        plan = make_plan(config, world)
        check_user_code(config)
        check_schedule(plan)
    except UserError as error:
        return DoctorTarget(config, world, None, error.problems)
    return DoctorTarget(config, world, plan, plan.warnings)
