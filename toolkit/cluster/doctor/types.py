"""The words of the doctor: checks, findings, and what a run needs of its machines."""

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


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"  # the run starts; this may cost time, or the run later on
    FAIL = "fail"  # the run would not start, or would be lost
    UNKNOWN = "unknown"  # it could not be looked at, and why is said


RANKING = (Verdict.OK, Verdict.UNKNOWN, Verdict.WARN, Verdict.FAIL)


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Attributes:
        evidence: what was seen.
        remedy: what to do; empty where nothing is to be done.
        check, how: of the check that found it.
    """

    verdict: Verdict
    evidence: str
    remedy: str = ""
    check: str = ""
    how: str = ""

    def to_json(self) -> dict[str, str]:
        return {**asdict(self), "verdict": self.verdict.value}

    @staticmethod
    def from_json(message: Mapping[str, str]) -> Finding:
        return Finding(**{**message, "verdict": Verdict(message["verdict"])})  # type: ignore[arg-type]


def ok(evidence: str) -> Finding:
    return Finding(Verdict.OK, without_secrets(evidence))


def warn(evidence: str, remedy: str) -> Finding:
    return Finding(Verdict.WARN, without_secrets(evidence), without_secrets(remedy))


def fail(evidence: str, remedy: str) -> Finding:
    return Finding(Verdict.FAIL, without_secrets(evidence), without_secrets(remedy))


def unknown(evidence: str) -> Finding:
    return Finding(Verdict.UNKNOWN, without_secrets(evidence))


def worst(findings: Iterable[Finding]) -> Verdict:
    return max((finding.verdict for finding in findings), key=RANKING.index, default=Verdict.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a run asks of each of its machines."""

    device: Device
    engine: EngineName
    ranks: int
    ranks_per_node: int
    nodes: int
    run_dir: Path
    checkpoint_bytes: int | None  # of one checkpoint, of all ranks; None: unknown
    keep_checkpoints: int
    grace_seconds: int
    host_bytes: int | None  # of host memory on the fullest machine; None: unknown
    device_bytes: int | None  # on the fullest device; None: unknown
    address: str | None = None  # MASTER_ADDR; None: nobody has started ranks
    serves_port: int | None = None  # the port that this process will listen on, as rank 0


def need_of(
    config: RunConfig,
    world: World,
    plan: RunPlan | None,
    *,
    address: str | None = None,
    serves_port: int | None = None,
) -> Need:
    """
    Args:
        plan: None where the run breaks a rule; then its bytes are unknown.
    """
    saved = checkpoint_bytes(plan) if plan is not None else None
    memory = plan.memory if plan is not None else None
    host = None
    if memory is not None:
        here = min(world.ranks, world.ranks_per_node)
        host = here * (memory.host + (memory.device_total if world.device is Device.CPU else 0))
        if config.checkpoint.background and saved is not None:  # a copy of the whole state, over all machines
            host += saved // world.nodes
    return Need(
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
class Check:
    """One thing that is looked at on a machine.

    Attributes:
        name: for the table.
        how: how it is measured, in one sentence.
        measure: asks the machine; runs in a child process, and what it returns is pickled.
        judge: facts -> findings; pure.
        seconds: after which the machine is taken to hang.
        hanging, stuck: how bad that is, and the remedy.
        traits: what should be alike on all machines, by name.
    """

    name: str
    how: str
    measure: Callable[[Need], Any]
    judge: Callable[[Any, Need], Iterable[Finding]]
    seconds: float = (
        30.0  # all run side by side on a machine that may be busy, and another one may hang as long
    )
    hanging: Verdict = Verdict.FAIL
    stuck: str = "look at the machine's kernel log (dmesg): something of it hangs"
    traits: Callable[[Any], Mapping[str, str]] = lambda _: {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """What was found on one machine."""

    node: int
    host: str
    findings: tuple[Finding, ...]
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
        findings = tuple(Finding.from_json(finding) for finding in message["findings"])
        return MachineReport(
            node=message["node"], host=message["host"], findings=findings, traits=message["traits"]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that the doctor has to say. ``together``: of the plan and between machines."""

    machines: tuple[MachineReport, ...]
    together: tuple[Finding, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*(finding for machine in self.machines for finding in machine.findings), *self.together)

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
