"""The diagnosis and the report of a hang, from the ranks' reports.

pytest tests/monitor/test_hang_diagnosis.py
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from toolkit.monitor.alert import Level
from toolkit.monitor.collective_calls import CollectiveCall, calls_from_flight_recorder
from toolkit.monitor.hangs.diagnosis import diagnose, diagnose_mismatch
from toolkit.monitor.hangs.rank_reports import (
    HangEvidence,
    Neighbour,
    RankReport,
    combine_reports,
    format_ordinal,
    format_ranks,
)
from toolkit.monitor.hangs.report_text import MAX_STACKS, format_report
from toolkit.monitor.hangs.stacks import Frame, ProcessId, ThreadStack

AT = 10_000.0
IDLE = 100.0
DATA = Frame("/home/x/toolkit/data/order/prefetch.py", 61, "_Buffer.get")
LOOP = Frame("/home/x/toolkit/train/loop.py", 40, "train")
CALLS = Frame("/home/x/toolkit/engine/collectives.py", 120, "_Watched.call")
CACHE = Frame("/home/x/toolkit/data/remote/cache.py", 120, "read")
STORAGE = Frame("/home/x/toolkit/remote/storage.py", 200, "read_ranges")


def processes(ranks: int, per_host: int = 4) -> list[ProcessId]:
    return [ProcessId(f"node{rank // per_host}", 1000 + rank, "77", 5, 6) for rank in range(ranks)]


def call(
    number: int,
    operation: str = "all_reduce",
    tensors: str = "[1024] float32",
    *,
    group: str = "7",
    ranks: int = 4,
    axis: str = "data",
    finished: bool = True,
    ago: float = 90.0,
    peer: int | None = None,
) -> CollectiveCall:
    return CollectiveCall(
        group=group,
        ranks=tuple(range(ranks)),
        axis=axis,
        number=number,
        operation=operation,
        tensors=tensors,
        begun=AT - ago,
        finished=finished,
        peer=peer,
    )


def report(
    rank: int,
    *calls: CollectiveCall,
    main: tuple[Frame, ...] = (LOOP, CALLS),
    others: tuple[ThreadStack, ...] = (),
    neighbours: dict[int, Neighbour] | None = None,
    failure: str = "",
) -> RankReport:
    threads = (ThreadStack("MainThread", "S futex_wait_queue", main), *others)
    return RankReport(
        rank=rank,
        host=f"node{rank // 4}",
        pid=1000 + rank,
        at=AT,
        step=16,
        last="step 16",
        idle=IDLE,
        part="backward",
        threads=threads,
        calls=calls,
        neighbours=neighbours or {},
        failure=failure,
    )


def evidence(
    *reports: RankReport, ranks: int | None = None, own: dict[int, Neighbour] | None = None
) -> HangEvidence:
    return combine_reports({one.rank: one for one in reports}, processes(ranks or len(reports)), own or {})


def waiting(rank: int, number: int = 17, **named: object) -> RankReport:
    return report(rank, call(number - 1, ago=200), replace(call(number, **named), finished=False))  # type: ignore[arg-type]


def test_rank_that_skipped_a_collective_is_named_with_its_count() -> None:
    elsewhere = call(9, "broadcast", "[3] int64", group="0", axis="all", finished=False)
    diagnosis = diagnose(
        evidence(*(waiting(rank) for rank in (0, 1, 3)), report(2, call(16, ago=200), elsewhere))
    )
    assert diagnosis.cause == (
        "rank 2 has made 16 calls on axis data, ranks 0-1, 3 wait in the 17th: all_reduce [1024] float32"
    )
    assert diagnosis.where == "rank 2"
    assert "rank 2: waits in call 9 on all ranks, broadcast [3] int64" in diagnosis.evidence


@pytest.mark.parametrize("late", [0.0, 5.0])
def test_of_two_ranks_that_wait_for_each_other_the_one_with_a_new_transition_is_named(late: float) -> None:
    """Both are behind in a group: rank 0 has not reached the exchange, rank 1 not the probe before it."""

    def made(probes: int, exchanges: int, last: str, ago: float) -> list[CollectiveCall]:
        probe = [call(n, group="5", ranks=2, ago=300 - 10 * n) for n in range(1, probes + 1)]
        exchange = [
            call(n, tensors="[3] int64", group="0", ranks=2, axis="all", ago=299 - 10 * n)
            for n in range(1, exchanges + 1)
        ]
        newest = probe if last == "probe" else exchange
        newest[-1] = replace(newest[-1], finished=False, begun=AT - ago)
        return probe + exchange

    diagnosis = diagnose(
        evidence(report(0, *made(4, 3, "probe", 90 - late)), report(1, *made(3, 4, "exchange", 88)))
    )
    assert diagnosis.where == "rank 1"
    assert (
        diagnosis.cause
        == "rank 1 has made 3 calls on axis data, rank 0 waits in the 4th: all_reduce [1024] float32"
    )


def test_different_shapes_in_one_call_are_named() -> None:
    diagnosis = diagnose(evidence(waiting(0), waiting(1, tensors="[512] float32")))
    assert diagnosis.cause == "the ranks make calls with different shapes as number 17 on axis data"
    assert diagnosis.where == "ranks 0-1"
    assert diagnosis.evidence.startswith(
        "rank 0: all_reduce [1024] float32; rank 1: all_reduce [512] float32"
    )
    assert diagnose_mismatch(evidence(waiting(0), waiting(1))) is None


def test_calls_shifted_by_one_name_the_skipped_call() -> None:
    """The collectives of one group meet by number: after one is left out, the next one meets it."""
    both = [call(16, "all_gather", "[8] float32", ago=200)]
    first = report(0, *both, call(17, ago=91), call(18, "broadcast", "[2] int64", ago=90, finished=False))
    second = report(1, *both, call(17, "broadcast", "[2] int64", finished=False))
    diagnosis = diagnose(evidence(first, second))
    assert diagnosis.cause == "the ranks make calls that differ as number 17 on axis data"
    assert diagnosis.evidence.endswith("rank 1 skipped all_reduce [1024] float32, or only rank 0 made it")


def test_unequal_shares_are_no_mismatch() -> None:
    unequal = evidence(
        waiting(0, operation="all_to_all_single", tensors="[5] float32"),
        waiting(1, operation="all_to_all_single", tensors="[9] float32"),
    )
    assert diagnose_mismatch(unequal) is None
    assert diagnose(unequal).cause == "every rank has made its call, and the calls do not complete"


@pytest.mark.parametrize(
    ("alive", "expected"),
    [
        (True, "its thread data-stream is in read (toolkit/data/remote/cache.py:120)"),
        (False, "rank 1 has no thread that prefetches samples: it has ended"),
    ],
)
def test_rank_without_samples_is_named_with_its_prefetch_thread(alive: bool, expected: str) -> None:
    others = (
        (ThreadStack("data-stream", "S", (CACHE, STORAGE)),)
        if alive
        else (ThreadStack("wandb", "S", (LOOP,)),)
    )
    diagnosis = diagnose(
        evidence(
            waiting(0), report(1, call(16, ago=200), main=(LOOP, DATA), others=others), waiting(2), waiting(3)
        )
    )
    assert diagnosis.cause == "rank 1 is waiting for samples, and the others wait for it"
    assert expected in diagnosis.evidence
    assert "data.path" in diagnosis.next_step


def test_single_rank_reports_its_activity() -> None:
    assert diagnose(evidence(report(0, main=(LOOP, DATA)))).cause == "rank 0 is waiting for samples"
    diagnosis = diagnose(evidence(report(0, main=(Frame("/x/model.py", 7, "Model.forward"),))))
    assert diagnosis.cause == "rank 0 is in the model's backward, in Model.forward (/x/model.py:7)"


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("T", "rank 1 is stopped by a signal"),
        ("X", "rank 1 has ended"),
        ("D", "rank 1 is waiting in the kernel for a disk or a device"),
    ],
)
def test_silent_rank_is_named_with_its_process_state(state: str, cause: str) -> None:
    diagnosis = diagnose(evidence(waiting(0), waiting(2), waiting(3), ranks=4, own={1: Neighbour(state)}))
    assert (diagnosis.cause, diagnosis.where) == (cause, "rank 1")
    assert diagnosis.evidence.startswith("process 1001 on node0 ")
    assert "ranks 0, 2-3: waits in call 17" in diagnosis.evidence


def test_stopped_rank_is_reported_by_its_neighbour() -> None:
    reports = [waiting(rank) for rank in (0, 1, 2, 3, 4, 5, 6)]
    reports[4] = replace(reports[4], neighbours={7: Neighbour("T")})
    diagnosis = diagnose(evidence(*reports, ranks=8))
    assert (diagnosis.cause, diagnosis.where) == ("rank 7 is stopped by a signal", "rank 7")


def test_silent_nodes_are_named() -> None:
    diagnosis = diagnose(evidence(*(waiting(rank) for rank in range(4)), ranks=12))
    assert (diagnosis.cause, diagnosis.where) == ("no rank on node1 and node2 responds", "ranks 4-11")


def test_blocked_interpreter_is_distinguished_from_a_silent_rank() -> None:
    blocked = diagnose(evidence(waiting(0), ranks=2, own={1: Neighbour("S", 'File "x.py", line 3 in f')}))
    assert blocked.cause == "rank 1 is blocked by native code that holds the Python interpreter's lock"
    silent = diagnose(evidence(waiting(0), ranks=2, own={1: Neighbour("S")}))
    assert silent.cause == "rank 1 does not respond"


def test_failed_rank_is_named_first() -> None:
    diagnosis = diagnose(evidence(waiting(0), report(1, failure="RuntimeError: out of memory\n  more")))
    assert diagnosis.cause == "rank 1 failed: RuntimeError: out of memory"


def test_pipeline_stage_that_waits_names_its_neighbour() -> None:
    receiving = call(4, "recv", "[2, 8] float32", axis="pipeline", finished=False, peer=0)
    diagnosis = diagnose(evidence(report(0, main=(LOOP, DATA)), report(1, receiving)))
    assert diagnosis.cause == "rank 0 is waiting for samples, and the others wait for it"
    assert "rank 1: waits in recv from rank 0 [2, 8] float32 on axis pipeline" in diagnosis.evidence


def test_older_unfinished_call_blocks_only_inside_a_collective() -> None:
    old = replace(call(3, ago=IDLE + 50), finished=False)
    assert report(0, old, main=(LOOP, DATA)).blocking_call is None
    assert report(0, old, main=(LOOP, CALLS)).blocking_call == old


def test_report_survives_json() -> None:
    one = report(
        1,
        call(2, peer=3),
        others=(ThreadStack("t", "", (STORAGE,)),),
        neighbours={2: Neighbour("T", "x")},
        failure="E: y",
    )
    assert RankReport.from_json(one.to_json()) == one


def test_report_has_each_distinct_stack_once() -> None:
    odd = report(2, call(16, ago=200), main=(LOOP, DATA))
    all_reports = evidence(
        waiting(0),
        waiting(1),
        odd,
        waiting(3),
        ranks=6,
        own={4: Neighbour("T"), 5: Neighbour("R", "frozen here")},
    )
    diagnosis = diagnose(all_reports)
    text = format_report(
        diagnosis,
        all_reports,
        "No progress.",
        lambda file, line: f"    text of line {line}\n" if "loop" in file else "",
    )
    assert text.count("toolkit/train/loop.py:40 train:  text of line 40") == 2
    assert "  rank 2, thread MainThread (S futex_wait_queue)" in text
    assert "  ranks 0-1, 3, thread MainThread" in text
    assert text.index("  rank 2, thread") < text.index("  ranks 0-1, 3, thread"), "rare stacks first"
    assert "rank 4 (node1 1004): NO RESPONSE; its process is stopped by a signal (T)" in text
    assert "frozen here" in text
    assert "ranks 0-1, 3: 16 all_reduce [1024] float32; 17 all_reduce [1024] float32 WAITS" in text
    assert diagnosis.alert(16).level is Level.ERROR


def test_thousand_ranks_are_diagnosed_quickly_in_few_lines() -> None:
    """Each rank is in a group of all and in one of eight; rank 700 skipped a call."""

    def report_of(rank: int) -> RankReport:
        first = rank // 8 * 8
        own = [
            replace(call(n, group=f"g{first}", ago=300 - n), ranks=tuple(range(first, first + 8)))
            for n in range(1, 9)
        ]
        every = [
            call(n, "all_gather", group="0", ranks=1000, axis="all", ago=200 - n)
            for n in range(1, 9 if rank == 700 else 10)
        ]
        every[-1] = replace(every[-1], finished=rank == 700)
        return report(rank, *own, *every, main=(LOOP, DATA) if rank == 700 else (LOOP, CALLS))

    reports = [report_of(rank) for rank in range(1000)]
    began = time.process_time()
    all_reports = evidence(*reports)
    diagnosis = diagnose(all_reports)
    text = format_report(diagnosis, all_reports, "", lambda file, line: "")
    assert time.process_time() - began < 3
    assert diagnosis.where == "rank 700"
    assert (
        "rank 700 has made 8 calls on all ranks, ranks 0-699, 701-999 wait in the 9th" in diagnosis.evidence
    )
    assert len(text.splitlines()) < 60 + MAX_STACKS


def test_ranks_and_ordinals_are_formatted() -> None:
    assert [format_ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21, 112)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "21st",
        "112th",
    ]
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([0, 2, 3, 4, 7]) == "ranks 0, 2-4, 7"


def test_calls_are_read_from_the_flight_recorder() -> None:
    entry = {
        "process_group": ["5", "default"],
        "is_p2p": False,
        "collective_seq_id": 3,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 2], [3], [1], [1]],
        "input_dtypes": ["Float"] * 4,
        "time_created_ns": 2_000_000_000,
        "retired": False,
        "state": "started",
    }
    done = [{**entry, "collective_seq_id": n, "state": "completed"} for n in range(1, 12)]
    trace = {"entries": [*done, {**entry, "collective_seq_id": 12}, {**entry, "process_group": ["6", ""]}]}
    known = call(1, group="5", ranks=2, axis="tensor")
    calls = calls_from_flight_recorder(trace, [known])
    assert [one.number for one in calls] == list(range(5, 13))
    assert calls[-1] == CollectiveCall(
        group="5",
        ranks=(0, 1),
        axis="tensor",
        number=12,
        operation="all_reduce",
        tensors="[4, 2] Float, [3] Float, [1] Float and 1 more",
        begun=2.0,
        finished=False,
    )
    assert calls[-2].finished
    passing = {**entry, "is_p2p": True, "p2p_seq_id": 2, "profiling_name": "nccl:recv 1<-0"}
    (one,) = calls_from_flight_recorder({"entries": [passing]}, [replace(known, ranks=(4, 6))])
    assert one.what == "recv from rank 4 [4, 2] Float, [3] Float, [1] Float and 1 more"
