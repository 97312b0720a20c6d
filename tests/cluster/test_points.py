"""Points of a sweep: their names, which are left out and why, what they take of a machine, who has them, how they are compared.

    pytest tests/cluster/test_points.py
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from rich.console import Console

from toolkit.cluster.environment import Launch
from toolkit.cluster.environment import Launcher as StartedBy
from toolkit.cluster.machine import Gpu, Machine
from toolkit.cluster.rendezvous import Left
from toolkit.cluster.sweep import run
from toolkit.cluster.sweep.carriers import LocalCarrier
from toolkit.cluster.sweep.points import make_points, name_of
from toolkit.cluster.sweep.record import PointState, Record, Row, number_of, result
from toolkit.cluster.sweep.run import refuse_in_ranks
from toolkit.cluster.sweep.show import grouped, ranked, table
from toolkit.cluster.sweep.slots import Slots, need_of
from toolkit.config.compose import compose, to_yaml
from toolkit.config.multirun import CarryOut, quoted, read_sweep, run_sweeper
from toolkit.config.sweep import SweepSection
from toolkit.errors import ConfigError, InputError
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

GIB = 2**30
TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"
MADE: dict[tuple[tuple[str, ...], Machine], list[Any]] = {}
LAPTOP = Machine(cores=4, host_memory_bytes=16 * GIB)
H100S = tuple(Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, f"GPU-{number}") for number in range(8))
EIGHT = Machine(cores=64, gpus=H100S, host_memory_bytes=2**40)


def batches(*typed: str, folder: Path = Path("sweeps/x")) -> list[list[tuple[str, ...]]]:
    """What Hydra's sweeper makes of the words."""
    made: list[list[tuple[str, ...]]] = []
    run_sweeper(read_sweep(["-m", *typed]), folder, CarryOut(lambda batch: made.append(list(batch)) or [0.0] * len(batch)))  # type: ignore[func-returns-value]
    return made


def points(*typed: str, machine: Machine = LAPTOP, folder: Path) -> list[Any]:
    """Made once for the same words and machine: composing takes a tenth of a second a point."""
    if (typed, machine) not in MADE:
        words = read_sweep(["-m", *typed])
        MADE[typed, machine] = make_points(batches(*typed, folder=folder)[0], words, Path("/sweeps/here"), machine, TRAIN)
    return MADE[typed, machine]


# -- words


def test_a_grid_is_every_combination_and_text_stays_text(tmp_path: Path) -> None:
    text = 'monitor.prompt="a, b = {1}"'
    [made] = batches("+exp=quickstart", "zero=stage1,stage2", "parallel.tensor=1,2", text, "data.path='007'", folder=tmp_path)
    assert [(point[1], point[2]) for point in made] == [
        ("zero=stage1", "parallel.tensor=1"), ("zero=stage1", "parallel.tensor=2"),
        ("zero=stage2", "parallel.tensor=1"), ("zero=stage2", "parallel.tensor=2")]
    config = compose(made[3])
    assert (config.monitor.prompt, config.data.path, config.zero.stage) == ("a, b = {1}", "007", 2)
    assert read_sweep(["-m", "+exp=quickstart", "zero=stage1,stage2"]).swept(made[0]) == ("zero=stage1", "parallel.tensor=1", *made[0][3:])


def test_the_last_word_of_a_key_counts(tmp_path: Path) -> None:
    typed = ("+exp=quickstart", "zero=stage0", "optim.lr=1,2", "zero=stage1,stage2", "optim.lr=1e-3")
    assert read_sweep(["-m", *typed]).fixed == {"+exp", "optim.lr"}
    assert [point.swept for point in points(*typed, folder=tmp_path)] == [("zero=stage1",), ("zero=stage2",)]


def test_batches_of_hydras_sweeper(tmp_path: Path) -> None:
    made = batches("+exp=quickstart", "zero=stage0,stage1,stage2", "hydra.sweeper.max_batch_size=2", folder=tmp_path)
    assert [len(batch) for batch in made] == [2, 1]


def test_the_words_decide_the_sweep_and_its_own_keys_do_not() -> None:
    def of(*words: str) -> tuple[str, str]:
        read = read_sweep(["-m", "+exp=quickstart", *words])
        return read.name, read.id

    assert of("zero=stage1,stage2") == of("zero=stage1,stage2", "sweep.at_once=1", "sweep.metric=tokens_per_second")
    assert of("zero=stage1,stage2") != of("zero=stage1,stage3")
    assert of("zero=stage1,stage2") != of("zero=stage1,stage2", "hydra.sweeper.max_batch_size=2")
    assert of("run.name=mine")[0] == "mine"
    assert read_sweep(["-m", "zero=stage1,stage2"]).name == "sweep"


@pytest.mark.parametrize(("word", "rule", "remedy"), [
    ("hydra/launcher=joblib", "chosen by cluster= alone", "cluster=slurm"),
    ("run.dir=/tmp/x", "run directory of its own", "sweep.dir=FOLDER"),
    ("sweep.at_onse=2", "sweep has no key at_onse", "sweep.at_once"),
    ("sweep.at_once=0", "at least 1", "sweep.at_once"),
    ("sweep.at_once=many", "a whole number", "sweep.at_once"),
    ("train.steps", "every word is KEY=VALUE", "train.steps=VALUE"),
    ("quickstart", "+exp=", "+exp=quickstart"),
    ("--frozen=x.yaml", "an option is", "leave it out"),
])
def test_mistakes_before_anything_is_made(word: str, rule: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sweep(["-m", word, "zero=stage1,stage2"])
    [problem] = caught.value.problems
    assert word.split("=")[0].lstrip("-") in problem.seen
    assert rule in problem.rule
    assert remedy in problem.remedy


@pytest.mark.parametrize("words", [
    ("hydra/sweeper=nosuch",), ("hydra.sweeper.nosuch=1",), ("optim.lr=interval(1e-4,1e-2)",), ("hydra.sweep.dir=/tmp/x",)])
def test_what_no_sweeper_takes_is_a_mistake_too(words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words[0].split("=")[0].split("(")[0]):
        points("+exp=quickstart", *words, folder=tmp_path)


def test_a_slip_in_one_value_refuses_the_whole_sweep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        points("+exp=quickstart", "zero=stage1,stage9", "modle.x=1", "optim.lr=1e-3,2e-3", folder=tmp_path)
    assert sorted(problem.key for problem in caught.value.problems) == ["modle.x", "zero"], "each once"


def test_a_point_has_one_name_whoever_makes_it() -> None:
    assert name_of(("zero=stage1", "parallel.tensor=2")).startswith("zero-stage1-tensor-2-")
    assert name_of(("zero=stage1", "parallel.tensor=2"))[-8:] == name_of(("parallel.tensor=2", "zero=stage1"))[-8:]
    awkward = [("data.path='a/b'",), ("data.path='a b'",), ("data.path='a/../b'",), ("monitor.prompt=" + "x" * 300,), ()]
    names = {name_of(swept) for swept in awkward}
    assert len(names) == len(awkward)
    assert all(name == Path(name).name and name.isascii() and len(name) < 80 and not name.startswith((".", "-")) for name in names)


@pytest.mark.parametrize("text", ["/a/b", "/a b/c", "/it's", "/back\\slash", "/ends\\", "/x\\'y", "/a=b,c", '/"', "/$HOME"])
def test_a_quoted_path_arrives_as_it_is(text: str) -> None:
    assert compose(["+exp=quickstart", f"run.dir={quoted(text)}"]).run.dir == text


# -- what is left out


def test_points_are_planned_and_refused_ones_have_their_reason(tmp_path: Path) -> None:
    found = points("+exp=quickstart", "zero=stage1", "parallel.tensor=1,3", "cluster.cpu_ranks=2", folder=tmp_path)
    assert [point.plan is not None for point in found] == [True, False]
    good, bad = found
    assert "parallel.tensor=3" in bad.reason
    assert "divisible" in bad.reason
    assert good.plan.config == compose(good.words)
    assert good.plan.run_dir == f"/sweeps/here/{good.name}"
    assert good.plan.config.monitor.group == "here", "the sweep's id"
    [own] = points("+exp=quickstart", "monitor.group=mine", folder=tmp_path)
    assert own.plan.config.monitor.group == "mine"


def test_what_the_plan_says_does_not_fit_is_left_out(tmp_path: Path) -> None:
    """Of a device: launch/train.py would warn, start, and run out of memory."""
    words = ("+exp=llama_8b_zero3_offload", "offload=none", "train.global_batch=64", "train.micro_batch=1,8", "cluster.gpus_per_node=8")
    small, large = points(*words, machine=EIGHT, folder=tmp_path)
    assert small.plan is not None
    assert small.plan.memory.device_total < 80 * GIB
    assert large.plan is None
    assert "does not fit" in large.reason
    words = tuple(word.replace("=1,8", "=8") for word in words)
    roomy = replace(EIGHT, gpus=tuple(replace(gpu, memory_bytes=800 * GIB) for gpu in EIGHT.gpus))
    assert points(*words, machine=roomy, folder=tmp_path)[0].plan is not None, "it is the memory that decides"


def test_what_the_cluster_would_refuse_is_left_out_too(tmp_path: Path) -> None:
    words = ("+exp=quickstart", "cluster=kubernetes", "cluster.gpus_per_node=0", "cluster.kubernetes.volumes={/sweeps: claim}")
    with_image, without = points(*words, "cluster.kubernetes.image=registry/image:1,null", folder=tmp_path)
    assert with_image.plan is not None
    assert without.plan is None
    assert "cluster.kubernetes.image" in without.reason


def test_words_that_mean_something_else_by_now_do_not_go_on_with_the_sweep(tmp_path: Path) -> None:
    """The points of one table are of one sweep: those that are done would not be run again."""
    (tmp_path / "exp").mkdir()
    experiment = tmp_path / "exp" / "mine.yaml"
    experiment.write_text("# @package _global_\ntrain:\n  seed: 1\n")
    words = read_sweep(["-m", f"--config-dir={tmp_path}", "+exp=mine", "zero=stage1,stage2"])

    def made() -> list[Any]:
        return make_points([("+exp=mine", "zero=stage1"), ("+exp=mine", "zero=stage2")], words, tmp_path / "sweep", LAPTOP, TRAIN)

    first, second = made()
    assert first.plan.config.train.seed == 1
    Path(first.plan.run_dir).mkdir(parents=True)
    RunDirectory(first.plan.run_dir).config_file.write_text(to_yaml(first.plan.config))
    assert made() == [first, second], "as it was"
    experiment.write_text("# @package _global_\ntrain:\n  seed: 2\n")
    with pytest.raises(ConfigError) as caught:
        made()
    [problem] = caught.value.problems
    assert "zero=stage1" in problem.seen
    assert "train.seed: 1 -> 2" in problem.seen
    assert "sweep.dir=FOLDER" in problem.remedy


def test_the_memory_of_the_host_counts_on_the_cpu(tmp_path: Path) -> None:
    words = ("+exp=quickstart", "cluster.cpu_ranks=2")
    needed = points(*words, folder=tmp_path)[0].plan.memory.device_total * 2
    assert points(*words, machine=replace(LAPTOP, host_memory_bytes=needed), folder=tmp_path)[0].plan is not None
    assert "does not fit" in points(*words, machine=replace(LAPTOP, host_memory_bytes=needed - 1), folder=tmp_path)[0].reason


def test_reasons_are_told_once_each() -> None:
    row = Row(name="", swept=[], words=[], run_dir="", state=PointState.REFUSED)
    rows = [replace(row, swept=[f"a={number}"], reason="odd" if number % 2 else "even\neven so") for number in range(9)]
    assert grouped(rows) == [
        "5 points refused: a=0, a=2, a=4, a=6 and 1 more\n    even\n    even so", "4 points refused: a=1, a=3, a=5, a=7\n    odd"]
    both = [*rows, replace(row, swept=["a=9"], reason="odd\nlarge"), replace(row, swept=["a=1"], state=PointState.FAILED, reason="x" * 999)]
    assert grouped(both)[1:] == [
        "5 points refused: a=1, a=3, a=5, a=7 and 1 more\n    odd", "1 point refused: a=9\n    large",
        f"1 point failed: a=1\n    {'x' * 300} ..."]


def test_the_table_can_be_read_in_a_narrow_terminal() -> None:
    row = Row(name="", swept=["zero=stage1", "optim.lr=0.001"], words=[], run_dir="", state=PointState.REFUSED, reason="long " * 99)
    rows = [row, replace(row, swept=["zero=stage1", "optim.lr=0.002"], state=PointState.DONE, number=2.5, step=300)]
    console = Console(width=80, file=io.StringIO())
    console.print(table(rows, "loss", maximize=False))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["│", "1", "│", "zero=stage1", "optim.lr=0.002", "│", "2.5", "│", "300", "│", "done", "│"] in lines
    assert ["│", "│", "zero=stage1", "optim.lr=0.001", "│", "│", "│", "refused", "│"] in lines


# -- room on a machine


def test_points_share_gpus_and_never_the_same_one(tmp_path: Path) -> None:
    [point] = points("+exp=quickstart", "cluster.gpus_per_node=3", "train.global_batch=24", machine=EIGHT, folder=tmp_path)
    need = need_of(point.plan, EIGHT, points=5)
    assert (point.plan.world.ranks, need.gpus, need.threads) == (3, 3, 8)
    slots, other = Slots(EIGHT, tmp_path / "slots"), Slots(EIGHT, tmp_path / "slots")
    first, second = slots.take(need), other.take(need)
    assert first is not None
    assert second is not None
    assert first.environ(need, {"A": "b"}) == {"A": "b", "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1,GPU-2", "OMP_NUM_THREADS": "8"}
    assert second.environ(need, {"OMP_NUM_THREADS": "2"}) == {"CUDA_VISIBLE_DEVICES": "GPU-3,GPU-4,GPU-5", "OMP_NUM_THREADS": "2"}
    assert slots.take(need) is None, "two are left"
    assert slots.take(replace(need, gpus=2)) is not None, "and were not kept by the attempt"
    other.release(second)
    assert slots.take(need) is not None


def test_what_an_orphan_uses_stays_taken(tmp_path: Path) -> None:
    slots = Slots(EIGHT, tmp_path)
    need = replace(need_of(points("+exp=quickstart", machine=EIGHT, folder=tmp_path)[0].plan, EIGHT, 1), host_bytes=0)
    place = slots.take(need)
    assert place is not None
    assert len(place.gpus) == 8
    orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=place.locks)
    slots.release(place)
    assert slots.take(need) is None
    orphan.kill()
    orphan.communicate()
    assert slots.take(need) is not None


def test_a_point_that_cannot_be_started_gives_its_place_back(tmp_path: Path) -> None:
    [point] = points("+exp=quickstart", machine=EIGHT, folder=tmp_path)
    (tmp_path / "file").touch()
    plan = replace(point.plan, run_dir=str(tmp_path / "file" / "run"))
    slots = Slots(EIGHT, tmp_path / "slots")
    carrier = LocalCarrier(TRAIN, EIGHT, 1, slots)
    with pytest.raises(InputError, match=r"run\.dir"):
        carrier.start(replace(point, plan=plan), claim=0)
    assert slots.take(need_of(point.plan, EIGHT, 1)) is not None, "all eight are free"


def test_the_locks_of_another_user_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Slots(EIGHT, tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(InputError, match="belongs to user"):
        Slots(EIGHT, tmp_path)


def test_cores_are_shared_and_memory_counted(tmp_path: Path) -> None:
    one, two = points("+exp=quickstart", "engine.name=deepspeed", "cluster.cpu_ranks=1,2", folder=tmp_path)
    assert [need_of(one.plan, LAPTOP, count).cores for count in (1, 2, 4, 8)] == [4, 2, 1, 1]
    assert [need_of(two.plan, LAPTOP, count).cores for count in (1, 2, 4)] == [4, 2, 2]
    assert (need_of(two.plan, LAPTOP, 2).threads, need_of(one.plan, LAPTOP, 2).threads) == (1, 2)
    [written] = points("+exp=quickstart", "debug.threads=3", folder=tmp_path)
    assert (need_of(written.plan, LAPTOP, 4).cores, need_of(written.plan, LAPTOP, 4).threads) == (3, 3)
    need = replace(need_of(one.plan, LAPTOP, 4), cores=0, host_bytes=9 * GIB)
    slots = Slots(LAPTOP, tmp_path / "slots")
    assert slots.take(need) is not None
    assert slots.take(need) is None, "18 of 16 GiB"
    assert slots.take(replace(need, host_bytes=7 * GIB)) is not None


# -- who has a point, and how it is


def test_a_claim_is_of_one_process_and_of_nobody_when_it_dies(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.begin("id", ["zero=stage1"], SweepSection())
    code = f"""
from pathlib import Path
from toolkit.cluster.sweep.record import Record
assert Record(Path({str(tmp_path)!r})).claim("point") is not None
print("taken", flush=True)
input()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"taken\n"
    assert record.claim("point") is None
    assert record.claim("another") is not None
    other.kill()
    other.communicate()
    assert record.claim("point") is not None


def test_two_records_keep_each_others_points(tmp_path: Path) -> None:
    first, second = Record(tmp_path), Record(tmp_path)
    for record in (first, second):
        record.begin("id", ["zero=stage1"], SweepSection())
    row = Row(name="a", swept=[], words=[], run_dir="a", state=PointState.WAITING)
    first.note(row)
    second.note(replace(row, name="b"))
    first.note(replace(row, state=PointState.DONE, number=1.0))
    assert [(row.name, row.state) for row in second.rows()] == [("a", "done"), ("b", "waiting")]
    second.begin("id", ["zero=stage1"], SweepSection())
    assert len(second.rows()) == 2, "a later start keeps what is known"
    refused = replace(row, state=PointState.REFUSED, reason="why")
    second.expect([row, replace(refused, name="b"), replace(row, name="c"), replace(refused, name="d")])
    assert [(row.name, row.state) for row in first.rows()] == [("a", "done"), ("b", "refused"), ("c", "waiting"), ("d", "refused")]
    first.expect([replace(refused, name="a"), replace(row, name="d")])
    states = {row.name: row.state for row in first.rows()}
    assert (states["a"], states["d"]) == ("done", "waiting"), "done by another machine stays done; what can run by now waits"
    with pytest.raises(ConfigError, match="a folder belongs to one sweep"):
        first.check("another", ["zero=stage2"])
    first.check("id", ["zero=stage1"])


def test_a_process_without_a_word_of_its_own_is_not_told_by_an_older_one(tmp_path: Path) -> None:
    [point] = points("+exp=quickstart", folder=tmp_path)
    directory = RunDirectory(tmp_path / point.name)
    directory.path.mkdir()
    assert result(point, tmp_path, None, silent="exit code 2: no").reason == "exit code 2: no"
    older = Status(state=RunState.FAILED, attempt=1, exit_code=1, reason="older")
    directory.write_status(older)
    told = result(point, tmp_path, None, before=older, silent="exit code 2: no")
    assert (told.state, told.reason) == (PointState.FAILED, "exit code 2: no")
    asked = result(point, tmp_path, None, before=older, silent="exit code 75", asked=True)
    assert (asked.state, asked.reason) == (PointState.STOPPED, "stopped before it began")
    directory.write_status(replace(older, attempt=2, reason="its own"))
    assert result(point, tmp_path, None, before=older, silent="exit code 1").reason == "its own"
    directory.write_status(Status(state=RunState.RUNNING, attempt=2, step=3))
    killed = result(point, tmp_path, None, before=older, silent="ended by signal 9")
    assert (killed.state, killed.reason, killed.step) == (PointState.FAILED, "ended by signal 9", 3)


def test_the_number_that_points_are_compared_by(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    config = compose(["+exp=quickstart", "eval.sets=[validation,other]", "eval.every=2"])
    assert number_of(directory, config, None) is None
    metrics = [{"step": step, "loss": 5.0 - step, "tokens_per_second": speed} for step, speed in enumerate((1.0, 10.0, 30.0, 20.0), 1)]
    directory.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in metrics) + '{"step": 5, "lo')
    assert number_of(directory, config, None) is None, "the evaluation is what counts"
    assert number_of(directory, compose(["+exp=quickstart", "eval.every=0"]), None) == 1.0
    evaluated = [("validation", 3.0), ("other", 9.0), ("validation", 2.5), ("other", 8.0)]
    directory.eval_file.write_text("".join(json.dumps({"step": 1, "set": name, "loss": loss}) + "\n" for name, loss in evaluated))
    assert number_of(directory, config, None) == 2.5
    assert number_of(directory, config, "other") == 8.0
    assert number_of(directory, config, "tokens_per_second") == 20.0, "the median, without the first step"
    assert number_of(directory, config, "nosuch") is None
    directory.eval_file.write_text(json.dumps({"step": 1, "set": "validation", "loss": float("nan")}) + "\n")
    assert number_of(directory, config, None) is None, "a run that diverged is not the best one"


def test_best_first() -> None:
    row = Row(name="", swept=[], words=[], run_dir="", state=PointState.DONE)
    rows = [replace(row, name="refused", state=PointState.REFUSED), replace(row, name="2", number=2.0), replace(row, name="none"),
            replace(row, name="1", number=1.0), replace(row, name="failed", state=PointState.FAILED)]
    assert [row.name for row in ranked(rows, maximize=False)] == ["1", "2", "none", "failed", "refused"]
    assert [row.name for row in ranked(rows, maximize=True)] == ["2", "1", "none", "failed", "refused"]


# -- Hydra's seams


class HalvingSweeper(Sweeper):
    """Asks for one learning rate after another, each half of the last, as long as the number falls."""

    def __init__(self, start: float) -> None:
        self.start = start

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments: list[str]) -> None:
        rate, best, index = self.start, float("inf"), 0
        assert self.launcher is not None
        while True:
            batch: Sequence[Sequence[str]] = [[*arguments, f"optim.lr={rate}"]]
            self.validate_batch_is_legal(batch)
            [returned] = self.launcher.launch(batch, initial_job_idx=index)
            assert isinstance(returned, JobReturn)
            if returned.return_value >= best:
                return
            rate, best, index = rate / 2, returned.return_value, index + 1


def test_another_sweeper_gets_the_numbers_of_its_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HalvingSweeper.__module__ = "hydra_plugins.halving"  # as an installed one
    monkeypatch.setitem(sys.modules, "hydra_plugins.halving", sys.modules[__name__])
    Plugins.instance().register(HalvingSweeper)
    node = {"_target_": "hydra_plugins.halving.HalvingSweeper", "start": 0.8}
    ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=node, provider="halving")
    tried: list[float] = []

    def carry_out(batch: Sequence[tuple[str, ...]]) -> list[float]:
        tried.extend(compose(words).optim.lr for words in batch)
        return [abs(tried[-1] - 0.1)]

    words = read_sweep(["-m", "+exp=quickstart", "hydra/sweeper=halving"])
    run_sweeper(words, tmp_path, CarryOut(carry_out))
    assert tried == [0.8, 0.4, 0.2, 0.1, 0.05]
    assert not words.grid
    assert words.swept(("+exp=quickstart", "optim.lr=0.8")) == ("optim.lr=0.8",)


def test_hydra_finds_the_launcher_and_other_programs_are_told_that_it_is_not_theirs() -> None:
    [own] = [found for found in Plugins.instance().discover(Launcher) if found.__name__ == "ToolkitLauncher"]
    assert own.__module__ == "hydra_plugins.toolkit_launcher"
    launcher: Any = own()
    with pytest.raises(Exception, match="and no others"):
        launcher.setup(hydra_context=None, task_function=lambda config: None, config=None)


def test_no_rank_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ANSWER_SECONDS", 0.0)
    refuse_in_ranks(Launch(), ["-m"])
    with pytest.raises(ConfigError, match=r"write python launch/train\.py -m optim\.lr=1,2"):
        refuse_in_ranks(Launch(launcher=StartedBy.TORCHELASTIC, ranks=2), ["-m", "optim.lr=1,2"])
    with pytest.raises(Left):
        refuse_in_ranks(Launch(launcher=StartedBy.DEEPSPEED, ranks=2, rank=1), ["-m", "optim.lr=1,2"])
