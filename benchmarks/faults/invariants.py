"""The invariants of every case, whatever the fault was. Each check is a function of the files of the case.

A check returns one sentence for each violation, and nothing if all is well.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.cases import BATCH, STEPS
from benchmarks.faults.recovery import read_rank_records
from toolkit import checkpoint_folder
from toolkit.checkpoint.directory import load_manifest
from toolkit.checkpoint.verify import verify
from toolkit.errors import UserError
from toolkit.goodput import read_times
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

SHOWN = 5  # steps that a sentence names
KEPT_CHECKPOINTS = 2  # checkpoint.keep_last
FILES_PER_ATTEMPT = 40
TEMPORARY_NAMES = (checkpoint_folder.TEMPORARY, checkpoint_folder.REMOVED)
# What torchrun and multiprocessing leave in TMPDIR when they are killed, and Inductor's cache.
OF_TORCH = ("torchelastic_", "pymp-", "torch-", "torchinductor_")


@dataclass(frozen=True)
class End:
    """The end of one command.

    Attributes:
        code: exit code of what the user started; None if it had to be killed.
        orphans: processes that were left, long after the command had ended.
        late: the command did not end within its limit.
    """

    code: int | None
    status: Status | None
    orphans: tuple[str, ...] = ()
    late: bool = False

    @property
    def was_killed(self) -> bool:
        """Whether the launcher was killed. Its ranks may complete the run before they notice that."""
        return self.code == -signal.SIGKILL

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """The files and processes that a case leaves behind.

    Attributes:
        run: the run's folder.
        rank_records: the folder of ``instrumentation.py``.
        reference: losses by step of the unbroken run of the same layout.
        damaged_step: step of the checkpoint that the fault damaged.
        temporary: TMPDIR of the run's processes; None if it is gone.
        memory: the folders in memory that the run's snapshots had.
        status_writable: whether the run could write its status when it ended.
    """

    run: Path
    rank_records: Path
    reference: Mapping[int, float]
    ends: Sequence[End]
    damaged_step: int | None = None
    temporary: Path | None = None
    memory: Sequence[Path] = ()
    status_writable: bool = True


def _listed(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - SHOWN} more" if len(steps) > SHOWN else ""
    return f"{', '.join(map(str, steps[:SHOWN]))}{more}"


def samples_of_steps(rank_records: Path) -> dict[int, list[int]]:
    """Return the sorted samples that each step finally trained, over all data ranks.

    The last time that a rank began a step counts. Ranks that share their samples (tensor and pipeline axes)
    count once.
    """
    last: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in read_rank_records(rank_records):
        if "begun" in row:
            rows = last.setdefault((row["begun"], row["rank"]), [])
            if rows and rows[0]["pid"] != row["pid"]:
                rows.clear()
            rows.append(row)
    found: dict[int, dict[int, list[int]]] = {}
    for (step, _), rows in last.items():
        samples = [number for row in rows for number in row["samples"]]
        found.setdefault(step, {})[rows[0]["data_rank"]] = samples
    return {
        step: sorted(number for samples in ranks.values() for number in samples)
        for step, ranks in found.items()
    }


def check_samples(evidence: Evidence) -> Iterator[str]:
    """Each step is recorded once and in order, and trained exactly the samples that the plan gives it."""
    steps = [row["step"] for row in read_rows(RunDirectory(evidence.run).metrics_file)]
    if steps != list(range(1, STEPS + 1)):
        counts = Counter(steps)
        lost = [step for step in range(1, STEPS + 1) if step not in counts]
        repeated = [step for step, count in counts.items() if count > 1]
        yield f"rows: lost steps [{_listed(lost)}], repeated steps [{_listed(repeated)}], {len(steps)} rows"
    found = samples_of_steps(evidence.rank_records)
    wrong = [
        step
        for step in range(1, STEPS + 1)
        if found.get(step) != list(range((step - 1) * BATCH, step * BATCH))
    ]
    if wrong:
        yield f"other samples than planned in steps {_listed(wrong)}"
    for step, folder in checkpoint_folder.committed_checkpoints(evidence.run / "checkpoints").items():
        try:
            consumed = load_manifest(folder).scalars.get("consumed_samples")
        except UserError:
            continue  # check_loads reports it
        if consumed != step * BATCH:
            yield f"{folder.name} records {consumed} consumed samples instead of {step * BATCH}"


def check_losses(evidence: Evidence) -> Iterator[str]:
    """Losses equal those of the unbroken run to the bit, in repeated steps too."""
    directory = RunDirectory(evidence.run)
    files = [directory.metrics_file]
    files += [directory.attempt_folder(number) / "metrics.jsonl" for number in directory.attempts()]
    for file in files:
        rows = [row for row in read_rows(file) if _is_finite(row["loss"])] if file.exists() else []
        wrong = [row["step"] for row in rows if row["loss"] != evidence.reference.get(row["step"])]
        if wrong:
            yield f"{file.relative_to(evidence.run)}: other losses in steps {_listed(wrong)}"


def _is_finite(loss: object) -> bool:
    return isinstance(loss, float) and math.isfinite(loss)


def check_loads(evidence: Evidence) -> Iterator[str]:
    """Every checkpoint that remains is sound, and no attempt started from the damaged one."""
    directory = RunDirectory(evidence.run)
    for step, folder in checkpoint_folder.committed_checkpoints(directory.checkpoints).items():
        if step == evidence.damaged_step:
            continue
        try:
            found = verify(folder, workers=1)
        except UserError as error:
            yield f"{folder.name}: {error}"
            continue
        if found:
            yield f"{folder.name}: {found[0]}"
    if evidence.damaged_step is not None:
        for number in directory.attempts():
            times = read_times(directory.attempt_folder(number))
            if times is not None and times.first == evidence.damaged_step:
                yield f"attempt {number} trained from step {evidence.damaged_step}, which was damaged"


def check_processes(evidence: Evidence) -> Iterator[str]:
    """Every command ends by itself, and no process outlives it."""
    for number, end in enumerate(evidence.ends, 1):
        if end.late:
            yield f"command {number} did not end in time"
        if end.orphans:
            yield f"command {number} left {len(end.orphans)} processes: {end.orphans[0]}"


def check_status(evidence: Evidence) -> Iterator[str]:
    """``status.json`` describes the end of each command truthfully."""
    for number, end in enumerate(evidence.ends, 1):
        if not evidence.status_writable and number == 1:
            continue
        status = end.status
        if status is None:
            # a launcher that fails before it starts a rank leaves no run
            if end.code == 0:
                yield f"command {number} succeeded without a status"
            continue
        where = f"command {number}, code {end.code}: status {status.state}"
        if status.state.live:
            yield f"{where}, although no process is left"
        elif status.state is RunState.DONE:
            if not (end.code == 0 or end.was_killed) or status.step != STEPS or status.exit_code != 0:
                yield f"{where}, step {status.step}, exit code {status.exit_code}"
            if status.checkpoint is None or not Path(status.checkpoint, "manifest.json").is_file():
                yield f"{where} names the checkpoint {status.checkpoint}, which does not exist"
        else:
            if end.code == 0:
                yield f"{where}, but the command succeeded"
            if not status.reason:
                yield f"{where} without a reason"


def check_leftovers(evidence: Evidence) -> Iterator[str]:
    """No temporary file and no snapshot in memory is left after the end of the run."""
    yield from (f"{folder} is left in memory" for folder in evidence.memory if folder.exists())
    left = sorted(
        str(path.relative_to(evidence.run))
        for path in evidence.run.rglob("*")
        if path.name.startswith(TEMPORARY_NAMES) or path.name.endswith(".writing")
    )
    if left:
        yield f"{len(left)} temporary files are left: {', '.join(left[:SHOWN])}"


def check_growth(evidence: Evidence) -> Iterator[str]:
    """Nothing grows with the number of failures except one folder for each attempt."""
    directory = RunDirectory(evidence.run)
    kept = checkpoint_folder.step_folders(directory.checkpoints)
    if len(kept) > KEPT_CHECKPOINTS:
        yield f"{len(kept)} checkpoints are kept instead of {KEPT_CHECKPOINTS}"
    for file in (directory.ledger_file, directory.metrics_file):
        rows = sum(1 for _ in read_rows(file)) if file.exists() else 0
        if rows > STEPS:
            yield f"{file.name} has {rows} rows for {STEPS} steps"
    for number in directory.attempts():
        files = [path for path in directory.attempt_folder(number).rglob("*") if path.is_file()]
        if len(files) > FILES_PER_ATTEMPT:
            yield f"attempt {number} has {len(files)} files"
    if evidence.temporary is not None:
        left = [path.name for path in evidence.temporary.iterdir() if not path.name.startswith(OF_TORCH)]
        if left:
            yield f"TMPDIR has {len(left)} entries: {', '.join(sorted(left)[:SHOWN])}"


Check = Callable[[Evidence], Iterator[str]]
INVARIANTS: Mapping[str, Check] = {
    "samples": check_samples,
    "losses": check_losses,
    "loads": check_loads,
    "processes": check_processes,
    "status": check_status,
    "leftovers": check_leftovers,
    "growth": check_growth,
}


def violations_of(evidence: Evidence) -> dict[str, list[str]]:
    """Return the violations by invariant; empty if all hold."""
    found = {name: list(check(evidence)) for name, check in INVARIANTS.items()}
    return {name: sentences for name, sentences in found.items() if sentences}
