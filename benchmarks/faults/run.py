"""Run one case: start the command, inject the fault, repeat the command if it stopped, collect evidence."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.faults.cases import LAYOUTS, STEP_SECONDS, STEPS, Case, RunLayout
from benchmarks.faults.catalogue import FAULTS, Expected, FaultClass
from benchmarks.faults.invariants import End, Evidence, violations_of
from benchmarks.faults.live_run import CaseFailed, LiveRun, release_folder
from benchmarks.faults.other_load import OtherLoad
from benchmarks.faults.recovery import read_rank_records, recovery_of
from toolkit.cluster.stop.stop_request import POLL_SECONDS as LAUNCHER_POLL_SECONDS
from toolkit.rows import read_rows
from toolkit.rundir.status import RunState

MAX_STARTS = 3  # of one command in a case
# that a run may complete before its ranks notice a dead launcher or a request to stop
NOTICE_STEPS = ceil(LAUNCHER_POLL_SECONDS / STEP_SECONDS)


def unbroken_losses(layout: RunLayout, folder: Path, data: Path) -> dict[int, float]:
    """Return the losses by step of a run of the layout without a fault; run it unless a result is stored.

    Raises:
        CaseFailed: the run did not end well.
    """
    stored = folder / "losses.json"
    if not stored.exists():
        release_folder(folder)
        folder.mkdir(parents=True)
        launcher = "torchrun" if layout.nodes > 1 else "python"
        case = Case(0, "none", layout.name, launcher, 0.0, 0)
        with ExitStack() as resources:
            run = LiveRun(case, folder, data, resources)
            run.environ["FAULT_STEP_SECONDS"] = "0"
            run.start()
            end = run.wait_for_end()
            if end.status is None or end.status.state is not RunState.DONE:
                raise CaseFailed(f"the unbroken run of {layout.name} failed: {end}\n{run.output_tail()}")
            losses = {row["step"]: row["loss"] for row in read_rows(run.directory.metrics_file)}
        stored.write_text(json.dumps(losses))
    return {int(step): loss for step, loss in json.loads(stored.read_text()).items()}


def run_case(case: Case, folder: Path, data: Path, reference: Mapping[int, float]) -> dict[str, Any]:
    """Run a case and return its row: what happened, which invariants it violates, and how long it took."""
    fault = FAULTS[case.fault]
    release_folder(folder)
    folder.mkdir(parents=True)
    began = time.time()
    ends: list[End] = []
    problem: str | None = None
    needs_repair = False
    with ExitStack() as resources:
        run = LiveRun(case, folder, data, resources, fault.overrides, fault.disk_mib)
        others = resources.enter_context(OtherLoad(run.mark))
        try:
            fault.prepare(run)
            if fault.at_start:
                needs_repair = True
                fault.inject(run)
            if case.warm:
                run.hold_after(case.step)
            run.start()
            if not fault.at_start:
                run.wait_for(lambda: run.step() >= 1)
                run.find_ranks()
                run.wait_for(lambda: run.step() >= case.step)
                if case.warm:
                    run.wait_for(run.has_standbys)
                    run.release()
                time.sleep(STEP_SECONDS * (case.moment % 1))
                run.moment, needs_repair = time.time(), True
                fault.inject(run)
        except CaseFailed as error:
            problem = str(error)
            run.release()  # otherwise repeated commands wait too
        ends.append(run.wait_for_end())
        while not is_done(ends[-1]) and len(ends) < MAX_STARTS:
            if needs_repair:
                fault.repair(run)
                needs_repair = False
            run.start(*fault.remedy_overrides(run))
            ends.append(run.wait_for_end())
        if needs_repair:
            fault.repair(run)
        evidence = Evidence(
            run=run.directory.path,
            rank_records=run.rank_records,
            reference=reference,
            ends=tuple(ends),
            damaged_step=run.damaged_step,
            temporary=None if run.nodes is not None else run.temporary,
            memory=tuple(run.memory_folders()),
            status_writable=can_write_status(case),
        )
        violations = violations_of(evidence)
        missed = not fault.at_start and was_too_late(run)
        unexpected = problem or differs_from_expected(fault, case, ends)
        if unexpected and not missed:
            violations["expected end"] = [unexpected]
        measured = run.moment > 0 and not missed
        recovery = recovery_of(evidence.run, run.rank_records, run.moment) if measured else None
        return {
            **case.to_json(),
            "expected": str(fault.expected),
            "ends": [end.to_json() for end in ends],
            "attempts": len(run.directory.attempts()),
            "missed": missed,
            "violations": violations,
            "recovery": recovery,
            "seconds": time.time() - began,
            "other_cores": others.cores(),
            "output": run.output_tail() if violations else "",
        }


def can_write_status(case: Case) -> bool:
    """Return whether the disk accepts the status after the fault, and a process is left that writes it."""
    if case.fault in ("disk-full", "disk-read-only"):
        return False
    # Without a parent process of the toolkit, only a rank can write it.
    all_killed = case.fault == "two-ranks-killed" and LAYOUTS[case.layout].ranks == 2
    return not (all_killed and case.launcher == "deepspeed")


def was_too_late(run: LiveRun) -> bool:
    """Return whether the run had completed its last step before the fault."""
    rows = list(read_rank_records(run.rank_records))
    last = [row["time"] for row in rows if row.get("ended") == STEPS]
    if run.ordered:
        return bool(last) and not any("obeyed" in row for row in rows)
    return bool(last) and (run.moment == 0 or min(last) <= run.moment)


def is_done(end: End) -> bool:
    return end.status is not None and end.status.state is RunState.DONE


def differs_from_expected(fault: FaultClass, case: Case, ends: Sequence[End]) -> str | None:
    """Return how the commands ended otherwise than expected; None: as expected."""
    expected = fault.expected
    if case.launcher == "deepspeed" and expected is Expected.RESTARTED:
        expected = Expected.STOPPED
    if not is_done(ends[-1]):
        return f"the run was not finished by {len(ends)} commands: {ends[-1]}"
    attempt = ends[-1].status.attempt if ends[-1].status is not None else 0
    if expected is Expected.STOPPED:
        may_be_done = fault.noticed_late and STEPS - case.step <= NOTICE_STEPS
        return None if len(ends) == 2 or may_be_done else f"{len(ends)} commands instead of 2"
    if len(ends) > 1:
        return f"the first command ended without finishing the run: {ends[0]}"
    if expected is Expected.UNAFFECTED and attempt > 1:
        return f"{attempt} attempts instead of 1"
    if expected is Expected.RESTARTED and attempt < 2:
        return "the ranks were not restarted"
    return None
