"""Whole runs on one process, on a tiny part of the standard library: never stopping against stopping and resuming.

pytest tests/train/test_run.py
"""

from __future__ import annotations

import email
import gc
import itertools
import json
import math
import re
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, Shard
from toolkit.config.data import Documents
from toolkit.config.monitor import MonitorConfig, WandbMode
from toolkit.config.schema import EvalConfig, RunConfig, RunSection
from toolkit.data.manifest import read_manifest
from toolkit.data.order import stream as stream_module
from toolkit.data.order.samples import TokenWindows
from toolkit.data.tokens.stdlib import ensure_stdlib
from toolkit.engine.local import LocalEngine
from toolkit.errors import CheckpointError, ExitCode, InputError, Problem
from toolkit.plan import make_plan
from toolkit.plan.present import to_json
from toolkit.plan.types import Device, World
from toolkit.rundir.directory import RunDirectory
from toolkit.testing.tiny import tiny_config
from toolkit.train.generate import load_tokenizer
from toolkit.train.run import run

WORLD = World(ranks=1, ranks_per_node=1, device=Device.CPU)
STEPS = 6


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The email package in parts, so that both splits have documents."""
    texts = tmp_path_factory.mktemp("texts")
    for file in sorted(Path(email.__file__).parent.rglob("*.py")):
        for part, lines in enumerate(_parts(file.read_text(encoding="utf-8"))):
            (texts / f"{file.stem}_{part}.py").write_text(lines, encoding="utf-8")
    return texts


@pytest.fixture(scope="session")
def data(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "email"
    ensure_stdlib(folder, 264, root=texts)
    return folder


def _parts(text: str, lines: int = 100) -> list[str]:
    all_lines = text.splitlines(keepends=True)
    return ["".join(all_lines[first : first + lines]) for first in range(0, len(all_lines), lines)]


class Start:
    """One start of a run in ``folder``, stopped after ``stop_after`` of its own steps. GPT-2, which has every kind of dropout."""

    def __init__(
        self,
        folder: Path,
        data: Path,
        stop_after: int | None = None,
        config: Callable[[RunConfig], None] = lambda config: None,
        generation: Path | None = None,
        seconds_left: Callable[[], float | None] = lambda: None,
        **changes: Any,
    ) -> None:
        settings = tiny_config(
            "gpt2", **{"train__steps": STEPS, "model__dropout": 0.1, "checkpoint__every": "never", **changes}
        )
        settings.run = RunSection(dir=str(folder))
        settings.data.path, settings.data.vocab_size = str(data), 264
        settings.monitor, settings.debug.threads = MonitorConfig(wandb=WandbMode.disabled), 1
        settings.eval = EvalConfig(every=2, batches=2)
        config(settings)
        self.directory = RunDirectory(folder)
        plan = make_plan(settings, WORLD)
        self.attempt = self.directory.begin(settings, to_json(plan))
        asked = 0

        def stop() -> str | None:
            nonlocal asked
            asked += 1  # once a step
            return "SIGTERM" if stop_after is not None and asked >= stop_after else None

        try:
            self.code = run(
                plan,
                rank=0,
                local_rank=0,
                stop=stop,
                attempt=self.attempt,
                data=generation and str(generation),
                seconds_left=seconds_left,
            )
        finally:
            self.directory.release()
        status = self.directory.status()
        assert status is not None
        self.status = status

    def rows(self) -> list[dict[str, Any]]:
        """Without what the clock decides, and memory."""
        rows = _jsonl(self.directory.metrics_file)
        return [
            {key: value for key, value in row.items() if "second" not in key and "bytes" not in key}
            for row in rows
        ]

    def evals(self) -> list[tuple[int, str, float]]:
        return [(row["step"], row["set"], row["loss"]) for row in _jsonl(self.directory.eval_file)]

    def state(self) -> dict[str, torch.Tensor]:
        reader = open_reader(self.directory.path)
        shards = [
            Shard(
                key, info.shape, _whole(info.shape), torch.empty(info.shape, dtype=getattr(torch, info.dtype))
            )
            for key, info in reader.tensors.items()
        ]
        reader.read(shards)
        return {str(shard.key): shard.data for shard in shards}


def _whole(shape: tuple[int, ...]) -> Any:
    from toolkit.checkpoint.shard import Box

    return Box.whole(shape)


def _jsonl(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Start:
    """Never stopped."""
    return Start(tmp_path_factory.mktemp("runs") / "whole", data)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The folder of a run that was stopped after three steps; tests copy it."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    start = Start(folder, data, stop_after=3)
    assert start.code is ExitCode.STOPPED
    assert start.status.step == 3
    assert start.status.checkpoint == str(folder / "checkpoints" / "step-00000003")
    assert [row["step"] for row in start.rows()] == [1, 2, 3]
    return folder


def copied(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def test_a_run_leaves_what_people_and_programs_need(whole: Start, data: Path) -> None:
    assert whole.code is ExitCode.DONE
    assert whole.status.step == STEPS
    assert Path(str(whole.status.checkpoint)).name == "step-00000006"
    rows = _jsonl(whole.directory.metrics_file)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert list(rows[0]) == [
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "step_seconds",
        "data_seconds",
        "gc_seconds",
        "host_bytes",
        "tokens_per_second",
        "samples_per_second",
        "elapsed_seconds",
    ]
    assert list(rows[1]) == [*rows[0], "eta_seconds"]
    assert all(row["tokens"] == 8 * 32 for row in rows)
    assert rows[0]["loss"] == pytest.approx(math.log(264), abs=0.3)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert [(step, name) for step, name, _ in whole.evals()] == [
        (2, "validation"),
        (4, "validation"),
        (6, "validation"),
    ]
    assert (whole.directory.plots / "loss.png").exists()
    scalars = open_reader(whole.directory.path).scalars
    assert scalars["consumed_samples"] == 8 * STEPS
    assert scalars["identity"] == to_json(make_plan(tiny_identity(data), WORLD))["identity"]


def tiny_identity(data: Path) -> RunConfig:
    config = tiny_config("gpt2", train__steps=STEPS, model__dropout=0.1)
    config.data.path, config.data.vocab_size = str(data), 264
    return config


def test_stopped_and_resumed_is_bitwise_never_stopped(
    whole: Start, stopped: Path, data: Path, tmp_path: Path
) -> None:
    resumed = Start(copied(stopped, tmp_path), data)
    assert (resumed.code, resumed.attempt) == (ExitCode.DONE, 2)
    assert resumed.rows() == whole.rows()
    assert resumed.evals() == whole.evals()
    assert same(resumed.state(), whole.state())


def test_without_moments_the_resumed_run_is_another(
    whole: Start, stopped: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = LocalEngine.load

    def load_without_moments(self: LocalEngine, reader: Any) -> None:
        load(self, reader)
        for shard in self.shards():
            if shard.key.state in (EXP_AVG, EXP_AVG_SQ):
                shard.data.zero_()

    monkeypatch.setattr(LocalEngine, "load", load_without_moments)
    resumed = Start(copied(stopped, tmp_path), data)
    assert resumed.rows()[:4] == whole.rows()[:4]  # the forward pass of the fourth step knows of no moments
    assert abs(resumed.rows()[-1]["loss"] - whole.rows()[-1]["loss"]) > 1e-4


def test_evaluation_has_no_effect_on_training(whole: Start, data: Path, tmp_path: Path) -> None:
    without = Start(tmp_path / "run", data, config=lambda config: setattr(config.eval, "every", 0))
    assert without.rows() == whole.rows()
    assert same(without.state(), whole.state())
    assert without.evals() == []


def test_documents_are_kept_apart_in_training_and_evaluation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In windows of many documents, stopped and resumed; joined, the same samples have other losses."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(200):
        (texts / f"{number}.py").write_text(f"x{number} = {number * number}\n")
    ensure_stdlib(tmp_path / "data", 257, root=texts)
    settings = {"data__documents": Documents.separate, "optim__lr": 1e-2}
    separate = Start(tmp_path / "separate", tmp_path / "data", **settings)
    said = capfd.readouterr().out
    assert re.search(
        r"documents of train are kept apart: of 1\d\d documents \d\d\.\d% are cut \(0\.0% are longer", said
    ), said
    joined = Start(tmp_path / "joined", tmp_path / "data", optim__lr=1e-2)
    assert "kept apart" not in capfd.readouterr().out
    for ours, theirs in ((separate.rows(), joined.rows()), (separate.evals(), joined.evals())):
        assert len(ours) == len(theirs)
        assert ours[-1] != theirs[-1]
    assert [row["tokens"] for row in separate.rows()] == [row["tokens"] for row in joined.rows()]
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(separate.rows(), joined.rows(), strict=True)) > 1e-3
    Start(tmp_path / "resumed", tmp_path / "data", stop_after=3, **settings)
    resumed = Start(tmp_path / "resumed", tmp_path / "data", **settings)
    assert resumed.rows() == separate.rows()
    assert resumed.evals() == separate.evals()


def test_an_engine_is_closed_when_the_collector_sees_everything_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds is freed by a collection, which passes over what ``place.kept`` keeps while training."""
    train_step, close, kept = LocalEngine.train_step, LocalEngine.close, []

    def step(self: LocalEngine, *arguments: Any) -> Any:
        kept.append(gc.get_freeze_count() > 0)
        return train_step(self, *arguments)

    def end(self: LocalEngine) -> None:
        kept.append(gc.get_freeze_count() > 0)
        close(self)

    monkeypatch.setattr(LocalEngine, "train_step", step)
    monkeypatch.setattr(LocalEngine, "close", end)
    Start(tmp_path / "run", data, stop_after=2)
    assert kept == [True, True, False]


def test_dropout_is_at_work(whole: Start, data: Path, tmp_path: Path) -> None:
    without = Start(tmp_path / "run", data, model__dropout=0.0)
    assert abs(without.rows()[0]["loss"] - whole.rows()[0]["loss"]) > 1e-4


def test_time_adds_up_over_attempts_that_run_steps_again(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ended after step 5, with a checkpoint of step 4: what step 5 took is counted, although its row stands elsewhere."""
    every = {"checkpoint__every": "2"}
    Start(tmp_path / "run", data, stop_after=5, seconds_left=lambda: 0.0, **every)
    assert "stopped after step 5: " in capfd.readouterr().out
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = _jsonl(metrics)
    rows[-1]["elapsed_seconds"] += 1000.0
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    resumed = Start(tmp_path / "run", data, **every)
    elapsed = [row["elapsed_seconds"] for row in _jsonl(resumed.directory.metrics_file)]
    assert [later > 1000.0 for later in elapsed] == [False] * 4 + [True] * 2
    assert elapsed == sorted(elapsed)
    assert re.search(r"^6 steps in 1[67]:\d\d over all attempts, ", capfd.readouterr().out, re.MULTILINE)


def test_an_evaluation_that_a_stop_prevented_is_made_up_for(whole: Start, data: Path, tmp_path: Path) -> None:
    first = Start(tmp_path / "run", data, stop_after=4)
    assert [step for step, _, _ in first.evals()] == [2]
    assert Start(tmp_path / "run", data).evals() == whole.evals()


def test_steps_after_the_checkpoint_stand_once(whole: Start, data: Path, tmp_path: Path) -> None:
    """Stopped after step 5 without the time to save it, with a checkpoint of step 4."""
    every = {"checkpoint__every": "2"}
    Start(tmp_path / "run", data, stop_after=5, seconds_left=lambda: 0.0, **every)
    resumed = Start(tmp_path / "run", data, **every)
    assert resumed.rows() == whole.rows()
    assert [row["step"] for row in _jsonl(tmp_path / "run" / "attempts" / "001" / "metrics.jsonl")] == [5]
    assert sorted(path.name for path in resumed.directory.checkpoints.glob("step-*")) == [
        "step-00000004",
        "step-00000006",
    ]


def test_the_data_may_get_a_new_generation_meanwhile(
    whole: Start, texts: Path, data: Path, tmp_path: Path
) -> None:
    """Another run, with another vocabulary, has pointed the data folder to its own."""
    shared = tmp_path / "data"
    shutil.copytree(data, shared)
    mine = read_manifest(shared)
    ensure_stdlib(shared, 260, root=texts)
    assert read_manifest(shared).tokenizer.hash != mine.tokenizer.hash
    start = Start(tmp_path / "run", shared, generation=mine.folder)
    assert start.rows() == whole.rows()
    assert start.evals() == whole.evals()
    reader = open_reader(start.directory.path)
    assert load_tokenizer(shared, reader).get_vocab_size() == mine.tokenizer.size
    shutil.rmtree(mine.folder)
    with pytest.raises(InputError, match=f"no tokenizer of hash {mine.tokenizer.hash}"):
        load_tokenizer(shared, reader)


def test_a_run_sent_back_stays_there_though_it_dies_before_its_first_save(
    whole: Start, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without ``set_aside_later_checkpoints``, the next start takes the checkpoint of step 4 of the branch that was left."""
    settings = {"checkpoint__every": "2", "checkpoint__keep_last": 9}
    Start(tmp_path / "run", data, stop_after=4, **settings)
    back = tmp_path / "run" / "checkpoints" / "step-00000002"

    def dies(self: LocalEngine, *arguments: Any) -> None:
        raise RuntimeError("died")

    with monkeypatch.context() as context:
        context.setattr(LocalEngine, "train_step", dies)
        with pytest.raises(RuntimeError, match="died"):
            Start(
                tmp_path / "run", data, config=lambda config: setattr(config, "resume", str(back)), **settings
            )
    left = tmp_path / "run" / "attempts" / "001"
    assert [path.name for path in (left / "checkpoints").iterdir()] == ["step-00000004"]
    assert open_reader(left / "checkpoints" / "step-00000004").step == 4
    assert open_reader(tmp_path / "run").step == 2
    resumed = Start(tmp_path / "run", data, **settings)
    assert resumed.rows() == whole.rows()
    assert same(resumed.state(), whole.state())
    assert [row["step"] for row in _jsonl(left / "metrics.jsonl")] == [3, 4]
    assert sorted(path.name for path in resumed.directory.checkpoints.glob("step-*")) == [
        f"step-0000000{step}" for step in (2, 4, 6)
    ]


def test_a_refused_start_sets_nothing_aside(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Start(tmp_path / "run", data, stop_after=4, checkpoint__every="2")
    back = tmp_path / "run" / "checkpoints" / "step-00000002"

    def refuses(self: LocalEngine, reader: Any) -> None:
        raise CheckpointError(Problem("resume", "seen", "rule", "remedy"))

    monkeypatch.setattr(LocalEngine, "load", refuses)
    with pytest.raises(CheckpointError):
        Start(tmp_path / "run", data, config=lambda config: setattr(config, "resume", str(back)))
    assert open_reader(tmp_path / "run").step == 4


def test_a_full_disk_leaves_the_step_at_which_it_was_met(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``status.json`` is written once a second while training; the step of the failure is written in any case."""
    save = CheckpointStore.save

    def full(store: CheckpointStore, step: int, *arguments: Any, **named: Any) -> Any:
        if step == 4:
            raise CheckpointError(
                Problem(
                    "checkpoint", "step 4 could not be written: No space left on device", "rule", "remedy"
                )
            )
        return save(store, step, *arguments, **named)

    monkeypatch.setattr(CheckpointStore, "save", full)
    with pytest.raises(CheckpointError, match="No space"):
        Start(tmp_path / "run", data, checkpoint__every="2")
    status = RunDirectory(tmp_path / "run").status()
    assert status is not None
    assert status.step == 4
    assert status.checkpoint is not None
    assert status.checkpoint.endswith("step-00000002")


def test_a_finished_run_started_again_has_nothing_to_do(whole: Start, data: Path, tmp_path: Path) -> None:
    again = Start(copied(whole.directory.path, tmp_path), data)
    assert again.code is ExitCode.DONE
    assert again.rows() == whole.rows()
    assert again.evals() == whole.evals()


def test_the_export_opens_and_continues_a_prompt(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def wanted(config: RunConfig) -> None:
        config.checkpoint.export, config.monitor.prompt = True, "def main(args):"

    start = Start(tmp_path / "run", data, config=wanted)
    model = AutoModelForCausalLM.from_pretrained(start.directory.export)
    weights = {f"weight:{name}": parameter.detach() for name, parameter in model.named_parameters()}
    state = start.state()
    assert same(weights, {key: state[key] for key in state if key.startswith("weight:")})
    tokenizer = AutoTokenizer.from_pretrained(start.directory.export)
    assert tokenizer.decode(tokenizer("def main").input_ids) == "def main"
    said = capfd.readouterr().out
    row = _jsonl(start.directory.eval_file)[-1]
    assert f"\nvalidation loss: {row['loss']:.4f} nats a token (a unigram model: " in said
    assert "the model continues 'def main(args):'" in said
    last = said.strip().splitlines()[-4:]
    assert last[0] == f"saved in {tmp_path / 'run'}: metrics.jsonl, checkpoints, plots/loss.png, export"
    assert last[1].endswith(f"python launch/report.py {tmp_path / 'run'}")
    assert last[2].startswith("    generate text: python launch/generate.py ")
    assert "train.steps=12" in last[3]

    from launch.generate import main

    command = [str(tmp_path / "run"), "def main(args):", "--tokens", "8", "--temperature", "0"]
    assert main(command) == 0
    first = capfd.readouterr().out
    assert first.startswith("def main(args):")
    assert main([*command, "--weights", str(start.directory.export)]) == 0
    assert capfd.readouterr().out == first
    assert main([str(tmp_path / "nowhere"), "x"]) == 2


def test_a_fork_takes_over_state_and_steps_and_may_differ(stopped: Path, data: Path, tmp_path: Path) -> None:
    def forked(config: RunConfig) -> None:
        config.run.fork, config.optim.lr = str(stopped), 5e-4

    fork = Start(tmp_path / "fork", data, config=forked)
    assert [row["step"] for row in fork.rows()] == [4, 5, 6]
    assert fork.rows()[0]["lr"] == 5e-4
    assert fork.rows()[0]["loss"] < math.log(264)


def test_a_fork_with_a_doubled_global_batch_reads_on_at_the_next_sample(
    stopped: Path, data: Path, tmp_path: Path
) -> None:
    """At a learning rate of 0 one step of 16 samples has the mean loss of the two steps of 8 that the parent would have taken."""

    def forked(config: RunConfig) -> None:
        config.run.fork, config.optim.lr, config.model.dropout = str(stopped), 0.0, 0.0

    def doubled(config: RunConfig) -> None:
        forked(config)
        config.train.global_batch *= 2

    single, double = (
        Start(tmp_path / name, data, config=change, train__steps=7)
        for name, change in (("8", forked), ("16", doubled))
    )
    losses = [row["loss"] for row in single.rows()]
    pairs = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert [row["loss"] for row in double.rows()][:2] == pytest.approx(pairs, abs=1e-6)
    assert min(abs(a - b) for a, b in itertools.pairwise(losses)) > 1e-3, "else any samples would do"

    part = Start(tmp_path / "part", data, stop_after=2, config=doubled, train__steps=7)
    assert open_reader(part.directory.path).scalars["consumed_samples"] == 3 * 8 + 2 * 16
    assert Start(tmp_path / "part", data, config=doubled, train__steps=7).rows() == double.rows()


def test_other_data_is_refused_by_name(stopped: Path, data: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.py").write_text(f"print({number})\n" * 100)
    ensure_stdlib(tmp_path / "other", 264, root=texts)
    with pytest.raises(CheckpointError, match=r"data=.*the checkpoint has data="):
        Start(copied(stopped, tmp_path), tmp_path / "other")


def test_published_weights_are_the_start(whole: Start, data: Path, tmp_path: Path) -> None:
    exported = Start(tmp_path / "first", data, checkpoint__export=True)

    def pretrained(config: RunConfig) -> None:
        config.model.pretrained = str(exported.directory.export)

    tuned = Start(tmp_path / "tuned", data, config=pretrained)
    assert tuned.rows()[0]["loss"] < exported.rows()[0]["loss"] - 0.05


# ---- waiting for data


def stall_share(start: Start) -> float:
    rows = _jsonl(start.directory.metrics_file)[1:]
    return sum(row["data_seconds"] for row in rows) / sum(row["step_seconds"] for row in rows)


def test_a_loader_slowed_on_purpose_shows(
    whole: Start,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It takes ten steps' time for the samples of each. The control is the same run without the brake."""
    read = TokenWindows.read
    brake = 0.1 + 10 * statistics.median(row["step_seconds"] for row in _jsonl(whole.directory.metrics_file))

    def slow(self: TokenWindows, epochs: Any, numbers: Any) -> Any:
        time.sleep(brake)
        return read(self, epochs, numbers)

    monkeypatch.setattr(TokenWindows, "read", slow)
    monkeypatch.setattr(stream_module, "READ_AT_ONCE", 0)  # a step at a time
    monkeypatch.setattr(stream_module, "CHUNKS_AHEAD", 1)
    braked = Start(tmp_path / "run", data)
    assert braked.rows() == whole.rows()
    assert stall_share(braked) > 0.5 > 0.1 > stall_share(whole)
    said = re.search(r"([\d.]+)% of it waiting for data", capsys.readouterr().out)
    assert said is not None
    assert float(said[1]) == pytest.approx(100 * stall_share(braked), abs=0.01)
