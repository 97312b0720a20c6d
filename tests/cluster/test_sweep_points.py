"""Sweep arguments become points: names, refused points, and the integration with Hydra."""

from __future__ import annotations

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

from tests.cluster.sweep_points import EIGHT, GIB, LAPTOP, TRAIN, batches, points
from toolkit.cluster.jobs.job import plan_job
from toolkit.cluster.sweep import run
from toolkit.cluster.sweep.points import make_points, point_name
from toolkit.cluster.sweep.run import refuse_launcher
from toolkit.cluster.world.environment import Launch
from toolkit.cluster.world.environment import Launcher as StartedBy
from toolkit.cluster.world.rendezvous import PeerExited
from toolkit.config.compose import compose, to_yaml
from toolkit.config.multirun import BatchRunner, quoted, read_sweep, run_sweeper
from toolkit.errors import ConfigError, PlanError
from toolkit.estimate import step
from toolkit.estimate.types import StepEstimate
from toolkit.plan.types import RunPlan
from toolkit.rundir.directory import RunDirectory

# -- arguments


@pytest.mark.parametrize(("prune", "run"), [pytest.param("null", 3, marks=pytest.mark.full), ("2.5", 2)])
def test_points_that_are_predicted_to_be_slow_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prune: str, run: int
) -> None:
    def estimate(plan: RunPlan, profile: object) -> StepEstimate:
        seconds = float(plan.config.zero.stage)
        return StepEstimate(seconds=seconds, low=seconds, high=seconds, parts={})

    monkeypatch.setattr(step, "estimate_step", estimate)
    typed = ("+exp=quickstart", "zero=stage1,stage2,stage3", f"sweep.prune={prune}")
    words = read_sweep(["-m", *typed])
    made = make_points(batches(*typed, folder=tmp_path)[0], words, tmp_path, EIGHT, str(TRAIN))
    assert [point.plan is not None for point in made] == [True] * run + [False] * (3 - run)
    assert all("as long per token as the fastest point" in (point.reason or "") for point in made[run:])


def test_grid_is_every_combination(tmp_path: Path) -> None:
    text = 'monitor.prompt="a, b = {1}"'
    [made] = batches(
        "+exp=quickstart",
        "zero=stage1,stage2",
        "parallel.tensor=1,2",
        text,
        "data.path='007'",
        folder=tmp_path,
    )
    assert [(point[1], point[2]) for point in made] == [
        ("zero=stage1", "parallel.tensor=1"),
        ("zero=stage1", "parallel.tensor=2"),
        ("zero=stage2", "parallel.tensor=1"),
        ("zero=stage2", "parallel.tensor=2"),
    ]
    config = compose(made[3])
    assert (config.monitor.prompt, config.data.path, config.zero.stage) == ("a, b = {1}", "007", 2)
    assert read_sweep(["-m", "+exp=quickstart", "zero=stage1,stage2"]).swept(made[0]) == (
        "zero=stage1",
        "parallel.tensor=1",
        *made[0][3:],
    )


def test_last_override_of_a_key_wins(tmp_path: Path) -> None:
    typed = ("+exp=quickstart", "zero=stage0", "optim.lr=1,2", "zero=stage1,stage2", "optim.lr=1e-3")
    assert read_sweep(["-m", *typed]).fixed == {"+exp", "optim.lr"}
    assert [point.swept for point in points(*typed, folder=tmp_path)] == [("zero=stage1",), ("zero=stage2",)]


def test_hydra_sweeper_batches(tmp_path: Path) -> None:
    made = batches(
        "+exp=quickstart", "zero=stage0,stage1,stage2", "hydra.sweeper.max_batch_size=2", folder=tmp_path
    )
    assert [len(batch) for batch in made] == [2, 1]


def test_sweep_id_depends_on_overrides_only() -> None:
    def of(*words: str) -> tuple[str, str]:
        read = read_sweep(["-m", "+exp=quickstart", *words])
        return read.name, read.id

    assert of("zero=stage1,stage2") == of(
        "zero=stage1,stage2", "sweep.at_once=1", "sweep.metric=tokens_per_second"
    )
    assert of("zero=stage1,stage2") != of("zero=stage1,stage3")
    assert of("zero=stage1,stage2") != of("zero=stage1,stage2", "hydra.sweeper.max_batch_size=2")
    assert of("run.name=mine")[0] == "mine"
    assert read_sweep(["-m", "zero=stage1,stage2"]).name == "sweep"


@pytest.mark.parametrize(
    ("word", "rule", "remedy"),
    [
        ("hydra/launcher=joblib", "only cluster= decides", "cluster=slurm"),
        ("run.dir=/tmp/x", "its own run directory", "sweep.dir=FOLDER"),
        ("sweep.at_onse=2", "sweep has no key at_onse", "sweep.at_once"),
        ("sweep.at_once=0", "at least 1", "sweep.at_once"),
        ("sweep.at_once=many", "a whole number", "sweep.at_once"),
        ("train.steps", "an argument is KEY=VALUE", "train.steps=VALUE"),
        ("quickstart", "+exp=", "+exp=quickstart"),
        ("--frozen=x.yaml", "an option is", "leave it out"),
    ],
)
def test_invalid_arguments_are_rejected_first(word: str, rule: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sweep(["-m", word, "zero=stage1,stage2"])
    [problem] = caught.value.problems
    assert word.split("=")[0].lstrip("-") in problem.seen
    assert rule in problem.rule
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    "words",
    [
        ("hydra/sweeper=nosuch",),
        ("hydra.sweeper.nosuch=1",),
        ("optim.lr=interval(1e-4,1e-2)",),
        ("hydra.sweep.dir=/tmp/x",),
    ],
)
def test_invalid_sweeper_syntax_is_rejected(words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words[0].split("=")[0].split("(")[0]):
        points("+exp=quickstart", *words, folder=tmp_path)


def test_invalid_value_rejects_the_whole_sweep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        points("+exp=quickstart", "zero=stage1,stage9", "modle.x=1", "optim.lr=1e-3,2e-3", folder=tmp_path)
    assert sorted(problem.key for problem in caught.value.problems) == ["modle.x", "zero"], "each once"


def test_point_name_is_deterministic() -> None:
    assert point_name(("zero=stage1", "parallel.tensor=2")).startswith("zero-stage1-tensor-2-")
    assert (
        point_name(("zero=stage1", "parallel.tensor=2"))[-8:]
        == point_name(("parallel.tensor=2", "zero=stage1"))[-8:]
    )
    awkward = [
        ("data.path='a/b'",),
        ("data.path='a b'",),
        ("data.path='a/../b'",),
        ("monitor.prompt=" + "x" * 300,),
        (),
    ]
    names = {point_name(swept) for swept in awkward}
    assert len(names) == len(awkward)
    assert all(
        name == Path(name).name and name.isascii() and len(name) < 80 and not name.startswith((".", "-"))
        for name in names
    )


@pytest.mark.parametrize(
    "text", ["/a/b", "/a b/c", "/it's", "/back\\slash", "/ends\\", "/x\\'y", "/a=b,c", '/"', "/$HOME"]
)
def test_quoted_path_is_preserved(text: str) -> None:
    assert compose(["+exp=quickstart", f"run.dir={quoted(text)}"]).run.dir == text


# -- refused points


def test_refused_points_have_reasons(tmp_path: Path) -> None:
    found = points(
        "+exp=quickstart", "zero=stage1", "parallel.tensor=1,3", "cluster.cpu_ranks=2", folder=tmp_path
    )
    assert [point.plan is not None for point in found] == [True, False]
    good, bad = found
    assert "parallel.tensor=3" in bad.reason
    assert "divisible" in bad.reason
    assert good.plan.config == compose(good.words)
    assert good.plan.run_dir == f"/sweeps/here/{good.name}"
    assert good.plan.config.monitor.group == "here", "the sweep's id"
    [own] = points("+exp=quickstart", "monitor.group=mine", folder=tmp_path)
    assert own.plan.config.monitor.group == "mine"


@pytest.mark.full
def test_point_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """The same rule as for a single run."""
    words = (
        "+exp=llama_8b_zero3_offload",
        "offload=none",
        "train.global_batch=64",
        "train.micro_batch=1,8",
        "train.loss_kernel=plain",
        "cluster.gpus_per_node=8",
    )
    small, large = points(*words, machine=EIGHT, folder=tmp_path)
    assert small.plan is not None
    assert small.plan.memory.device_total < 80 * GIB
    assert large.plan is None
    assert "fit on its device" in large.reason
    with pytest.raises(PlanError, match="fit on its device"):
        plan_job(compose([word.replace("=1,8", "=8") for word in words]), EIGHT)
    words = tuple(word.replace("=1,8", "=8") for word in words)
    roomy = replace(EIGHT, gpus=tuple(replace(gpu, memory_bytes=800 * GIB) for gpu in EIGHT.gpus))
    assert points(*words, machine=roomy, folder=tmp_path)[0].plan is not None, "memory is the reason"


def test_point_that_the_backend_rejects_is_refused(tmp_path: Path) -> None:
    words = (
        "+exp=quickstart",
        "cluster=kubernetes",
        "cluster.gpus_per_node=0",
        "cluster.kubernetes.volumes={/sweeps: claim}",
    )
    with_image, without = points(*words, "cluster.kubernetes.image=registry/image:1,null", folder=tmp_path)
    assert with_image.plan is not None
    assert without.plan is None
    assert "cluster.kubernetes.image" in without.reason


def test_changed_experiment_file_is_rejected(tmp_path: Path) -> None:
    """All points of a table belong to one sweep, since points that are done do not run again."""
    (tmp_path / "exp").mkdir()
    experiment = tmp_path / "exp" / "mine.yaml"
    experiment.write_text("# @package _global_\ntrain:\n  seed: 1\n")
    words = read_sweep(["-m", f"--config-dir={tmp_path}", "+exp=mine", "zero=stage1,stage2"])

    def made() -> list[Any]:
        return make_points(
            [("+exp=mine", "zero=stage1"), ("+exp=mine", "zero=stage2")],
            words,
            tmp_path / "sweep",
            LAPTOP,
            TRAIN,
        )

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


@pytest.mark.full
def test_cpu_points_need_host_memory(tmp_path: Path) -> None:
    words = ("+exp=quickstart", "cluster.cpu_ranks=2")
    needed = points(*words, folder=tmp_path)[0].plan.memory.device_total * 2
    assert (
        points(*words, machine=replace(LAPTOP, host_memory_bytes=needed), folder=tmp_path)[0].plan is not None
    )
    [crowded] = points(*words, machine=replace(LAPTOP, host_memory_bytes=needed - 1), folder=tmp_path)
    assert "fits in its memory" in crowded.reason


# -- Hydra


class HalvingSweeper(Sweeper):
    """A sweeper that halves the learning rate as long as the result improves."""

    def __init__(self, start: float) -> None:
        self.start = start

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

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


@pytest.mark.full
def test_custom_sweeper_receives_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HalvingSweeper.__module__ = "hydra_plugins.halving"  # like an installed plugin
    monkeypatch.setitem(sys.modules, "hydra_plugins.halving", sys.modules[__name__])
    Plugins.instance().register(HalvingSweeper)
    node = {"_target_": "hydra_plugins.halving.HalvingSweeper", "start": 0.8}
    ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=node, provider="halving")
    tried: list[float] = []

    def carry_out(batch: Sequence[tuple[str, ...]]) -> list[float]:
        tried.extend(compose(words).optim.lr for words in batch)
        return [abs(tried[-1] - 0.1)]

    words = read_sweep(["-m", "+exp=quickstart", "hydra/sweeper=halving"])
    run_sweeper(words, tmp_path, BatchRunner(carry_out))
    assert tried == [0.8, 0.4, 0.2, 0.1, 0.05]
    assert not words.grid
    assert words.swept(("+exp=quickstart", "optim.lr=0.8")) == ("optim.lr=0.8",)


def test_hydra_finds_the_launcher_plugin() -> None:
    [own] = [found for found in Plugins.instance().discover(Launcher) if found.__name__ == "ToolkitLauncher"]
    assert own.__module__ == "hydra_plugins.toolkit_launcher"
    launcher: Any = own()
    with pytest.raises(Exception, match="runs only the sweeps"):
        launcher.setup(hydra_context=None, task_function=lambda config: None, config=None)


def test_sweep_under_a_launcher_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PEER_EXIT_SECONDS", 0.0)
    refuse_launcher(Launch(), ["-m"])
    with pytest.raises(ConfigError, match=r"run python -m toolkit\.launch\.train -m optim\.lr=1,2"):
        refuse_launcher(Launch(launcher=StartedBy.TORCHELASTIC, ranks=2), ["-m", "optim.lr=1,2"])
    with pytest.raises(PeerExited):
        refuse_launcher(Launch(launcher=StartedBy.DEEPSPEED, ranks=2, rank=1), ["-m", "optim.lr=1,2"])
