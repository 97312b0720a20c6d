"""Types of the doctor: checks, findings, and what a run requires of its machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from toolkit.config.schema import EngineName, RunConfig
from toolkit.errors import without_secrets
from toolkit.plan.checkpoint_size import checkpoint_bytes
from toolkit.plan.types import Device, RunPlan, World


class CheckVerdict(StrEnum):
    OK = "ok"
    WARN = "warn"  # the run starts, but may be slow or fail later
    FAIL = "fail"  # the run would not start, or would be lost
    UNKNOWN = "unknown"  # the check was not possible


RANKING = (CheckVerdict.OK, CheckVerdict.UNKNOWN, CheckVerdict.WARN, CheckVerdict.FAIL)


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """The result of a check.

    Attributes:
        evidence: what was measured.
        remedy: what to do; empty if nothing.
        check, how: name and method of the check.
    """

    verdict: CheckVerdict
    evidence: str
    remedy: str = ""
    check: str = ""
    how: str = ""

    def to_json(self) -> dict[str, str]:
        return {**asdict(self), "verdict": self.verdict.value}

    @staticmethod
    def from_json(message: Mapping[str, str]) -> CheckFinding:
        return CheckFinding(**{**message, "verdict": CheckVerdict(message["verdict"])})  # type: ignore[arg-type]


def ok(evidence: str) -> CheckFinding:
    return CheckFinding(CheckVerdict.OK, without_secrets(evidence))


def warn(evidence: str, remedy: str) -> CheckFinding:
    return CheckFinding(CheckVerdict.WARN, without_secrets(evidence), without_secrets(remedy))


def fail(evidence: str, remedy: str) -> CheckFinding:
    return CheckFinding(CheckVerdict.FAIL, without_secrets(evidence), without_secrets(remedy))


def unknown(evidence: str) -> CheckFinding:
    return CheckFinding(CheckVerdict.UNKNOWN, without_secrets(evidence))


def worst(findings: Iterable[CheckFinding]) -> CheckVerdict:
    return max((finding.verdict for finding in findings), key=RANKING.index, default=CheckVerdict.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequirements:
    """The requirements of a run for each of its machines."""

    device: Device
    engine: EngineName
    ranks: int
    ranks_per_node: int
    nodes: int
    run_dir: Path
    checkpoint_bytes: int | None  # of one checkpoint over all ranks; None: unknown
    keep_checkpoints: int
    grace_seconds: int
    host_bytes: int | None  # host memory on the fullest machine; None: unknown
    device_bytes: int | None  # on the fullest device; None: unknown
    address: str | None = None  # MASTER_ADDR; None: no launcher
    serves_port: int | None = None  # the port that this process will serve as rank 0


def compute_requirements(
    config: RunConfig,
    world: World,
    plan: RunPlan | None,
    *,
    address: str | None = None,
    serves_port: int | None = None,
) -> RunRequirements:
    """Compute the requirements of a run.

    Args:
        plan: None if the run breaks a rule; then its memory is unknown.
    """
    saved = checkpoint_bytes(plan) if plan is not None else None
    memory = plan.memory if plan is not None else None
    host = None
    if memory is not None:
        here = min(world.ranks, world.ranks_per_node)
        host = here * (memory.host + (memory.device_total if world.device is Device.CPU else 0))
        # a copy of the whole state, spread over all machines
        if plan is not None and plan.saves.background and saved is not None:
            host += saved // world.nodes
    return RunRequirements(
        device=world.device,
        engine=config.engine.name,
        ranks=world.ranks,
        ranks_per_node=world.ranks_per_node,
        nodes=world.nodes,
        run_dir=Path(plan.run_dir if plan is not None else config.run.dir or "runs"),
        checkpoint_bytes=saved,
        keep_checkpoints=config.checkpoint.keep_last,
        grace_seconds=config.cluster.grace_seconds,
        host_bytes=host,
        device_bytes=memory.device_total if memory is not None and world.device is Device.CUDA else None,
        address=address,
        serves_port=serves_port,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorCheck:
    """A check of one machine.

    Attributes:
        name: label in the table.
        how: the method, in one sentence.
        measure: reads the machine; runs in a child process, and its result is pickled.
        assess: converts a measurement to findings; pure.
        seconds: timeout of the measurement.
        hang_verdict, hang_remedy: finding after a timeout.
        traits: properties that should be equal on all machines, by name.
    """

    name: str
    how: str
    measure: Callable[[RunRequirements], Any]
    assess: Callable[[Any, RunRequirements], Iterable[CheckFinding]]
    seconds: float = 30.0  # all checks run concurrently, possibly on a busy machine
    hang_verdict: CheckVerdict = CheckVerdict.FAIL
    hang_remedy: str = "check the machine's kernel log (dmesg) for hung tasks"
    traits: Callable[[Any], Mapping[str, str]] = lambda _: {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """The findings of one machine."""

    node: int
    host: str
    findings: tuple[CheckFinding, ...]
    traits: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "host": self.host,
            "findings": [finding.to_json() for finding in self.findings],
            "traits": dict(self.traits),
        }

    @staticmethod
    def from_json(message: Mapping[str, Any]) -> MachineReport:
        findings = tuple(CheckFinding.from_json(finding) for finding in message["findings"])
        return MachineReport(
            node=message["node"], host=message["host"], findings=findings, traits=message["traits"]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The whole report. ``cross_machine``: findings on the plan and across machines."""

    machines: tuple[MachineReport, ...]
    cross_machine: tuple[CheckFinding, ...]

    @property
    def findings(self) -> tuple[CheckFinding, ...]:
        return (*(finding for machine in self.machines for finding in machine.findings), *self.cross_machine)

    @property
    def verdict(self) -> CheckVerdict:
        return worst(self.findings)


def format_size(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
