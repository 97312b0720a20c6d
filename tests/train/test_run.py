"""Whole runs on one process: a run that is stopped and resumed equals one that never stopped.

pytest tests/train/test_run.py
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import re
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny_run import STEPS, WORLD, TinyRun, equal_tensors, read_jsonl
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ
from toolkit.config.data import DocumentMasking
from toolkit.config.schema import RunConfig
from toolkit.data.manifest import read_manifest
from toolkit.data.order import stream as stream_module
from toolkit.data.order.samples import TokenWindows
from toolkit.data.tokens.stdlib import ensure_stdlib
from toolkit.engine.local import LocalEngine
from toolkit.errors import CheckpointError, ExitCode, InputError, Problem
from toolkit.estimate.plan_report import to_json
from toolkit.plan import make_plan
from toolkit.rundir.directory import RunDirectory
from toolkit.testing.tiny import tiny_config
from toolkit.train.generate import load_tokenizer


def copied(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def test_run_writes_metrics_evaluations_plots_and_checkpoints(whole: TinyRun, data: Path) -> None:
    assert whole.code is ExitCode.DONE
    assert whole.status.step == STEPS
    assert Path(str(whole.status.checkpoint)).name == "step-00000006"
    rows = read_jsonl(whole.directory.metrics_file)
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


def test_resumed_run_equals_an_unstopped_run_bitwise(
    whole: TinyRun, stopped: Path, data: Path, tmp_path: Path
) -> None:
    resumed = TinyRun(copied(stopped, tmp_path), data)
    assert (resumed.code, resumed.attempt) == (ExitCode.DONE, 2)
    assert resumed.rows() == whole.rows()
    assert resumed.evals() == whole.evals()
    assert equal_tensors(resumed.state(), whole.state())


def test_resuming_without_adam_moments_changes_the_losses(
    whole: TinyRun, stopped: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = LocalEngine.load

    def load_without_moments(self: LocalEngine, reader: Any) -> None:
        load(self, reader)
        for shard in self.shards():
            if shard.key.state in (EXP_AVG, EXP_AVG_SQ):
                shard.data.zero_()

    monkeypatch.setattr(LocalEngine, "load", load_without_moments)
    resumed = TinyRun(copied(stopped, tmp_path), data)
    assert (
        resumed.rows()[:4] == whole.rows()[:4]
    )  # the forward pass of the fourth step does not depend on the moments
    assert abs(resumed.rows()[-1]["loss"] - whole.rows()[-1]["loss"]) > 1e-4


def test_evaluation_does_not_change_training(whole: TinyRun, data: Path, tmp_path: Path) -> None:
    without = TinyRun(tmp_path / "run", data, config=lambda config: setattr(config.eval, "every", 0))
    assert without.rows() == whole.rows()
    assert equal_tensors(without.state(), whole.state())
    assert without.evals() == []


def test_separate_documents_change_losses_in_training_and_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In windows of many documents, stopped and resumed; joined, the same samples have other losses."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(200):
        (texts / f"{number}.py").write_text(f"x{number} = {number * number}\n")
    ensure_stdlib(tmp_path / "data", 257, root=texts)
    settings = {"data__documents": DocumentMasking.separate, "optim__lr": 1e-2}
    separate = TinyRun(tmp_path / "separate", tmp_path / "data", **settings)
    assert re.search(
        r"documents of train are separate: of 1\d\d documents \d\d\.\d% are cut \(0\.0% are longer",
        caplog.text,
    ), caplog.text
    caplog.clear()
    joined = TinyRun(tmp_path / "joined", tmp_path / "data", optim__lr=1e-2)
    assert "are separate" not in caplog.text
    for ours, theirs in ((separate.rows(), joined.rows()), (separate.evals(), joined.evals())):
        assert len(ours) == len(theirs)
        assert ours[-1] != theirs[-1]
    assert [row["tokens"] for row in separate.rows()] == [row["tokens"] for row in joined.rows()]
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(separate.rows(), joined.rows(), strict=True)) > 1e-3
    TinyRun(tmp_path / "resumed", tmp_path / "data", stop_after=3, **settings)
    resumed = TinyRun(tmp_path / "resumed", tmp_path / "data", **settings)
    assert resumed.rows() == separate.rows()
    assert resumed.evals() == separate.evals()


def test_garbage_collector_is_unfrozen_before_the_engine_is_closed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step, close, frozen = LocalEngine.train_step, LocalEngine.close, []

    def step(self: LocalEngine, *arguments: Any) -> Any:
        frozen.append(gc.get_freeze_count() > 0)
        return train_step(self, *arguments)

    def end(self: LocalEngine) -> None:
        frozen.append(gc.get_freeze_count() > 0)
        close(self)

    monkeypatch.setattr(LocalEngine, "train_step", step)
    monkeypatch.setattr(LocalEngine, "close", end)
    TinyRun(tmp_path / "run", data, stop_after=2)
    assert frozen == [True, True, False]


def test_dropout_changes_the_losses(whole: TinyRun, data: Path, tmp_path: Path) -> None:
    without = TinyRun(tmp_path / "run", data, stop_after=1, model__dropout=0.0)
    assert abs(without.rows()[0]["loss"] - whole.rows()[0]["loss"]) > 1e-4


def test_repeated_steps_have_one_row_and_their_time_adds_up(
    whole: TinyRun, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run stops after step 5 without time to save it, with a checkpoint of step 4: the time of step 5
    counts, although its row moves.
    """
    every = {"checkpoint__every": "2"}
    TinyRun(tmp_path / "run", data, stop_after=5, seconds_left=lambda: 0.0, **every)
    assert "stopped after step 5: " in caplog.text
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = read_jsonl(metrics)
    rows[-1]["elapsed_seconds"] += 1000.0
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    resumed = TinyRun(tmp_path / "run", data, **every)
    assert resumed.rows() == whole.rows()
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "attempts" / "001" / "metrics.jsonl")] == [5]
    assert sorted(path.name for path in resumed.directory.checkpoints.glob("step-*")) == [
        "step-00000004",
        "step-00000006",
    ]
    elapsed = [row["elapsed_seconds"] for row in read_jsonl(resumed.directory.metrics_file)]
    assert [later > 1000.0 for later in elapsed] == [False] * 4 + [True] * 2
    assert elapsed == sorted(elapsed)
    assert re.search(r"^6 steps in 1[67]:\d\d over all attempts, ", "\n".join(caplog.messages), re.MULTILINE)


def test_next_start_makes_an_evaluation_that_a_stop_prevented(
    whole: TinyRun, data: Path, tmp_path: Path
) -> None:
    first = TinyRun(tmp_path / "run", data, stop_after=4)
    assert [step for step, _, _ in first.evals()] == [2]
    assert TinyRun(tmp_path / "run", data).evals() == whole.evals()


def test_run_keeps_its_data_generation_when_the_folder_gets_a_new_one(
    whole: TinyRun, texts: Path, data: Path, tmp_path: Path
) -> None:
    """Another run points the data folder to a generation with another vocabulary."""
    shared = tmp_path / "data"
    shutil.copytree(data, shared)
    mine = read_manifest(shared)
    ensure_stdlib(shared, 260, root=texts)
    assert read_manifest(shared).tokenizer.hash != mine.tokenizer.hash
    start = TinyRun(tmp_path / "run", shared, generation=mine.folder)
    assert start.rows() == whole.rows()
    assert start.evals() == whole.evals()
    reader = open_reader(start.directory.path)
    assert load_tokenizer(shared, reader).get_vocab_size() == mine.tokenizer.size
    shutil.rmtree(mine.folder)
    with pytest.raises(InputError, match=f"no tokenizer of hash {mine.tokenizer.hash}"):
        load_tokenizer(shared, reader)


def test_resume_from_an_older_checkpoint_persists_if_the_run_dies_before_saving(
    whole: TinyRun, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``set_aside_later_checkpoints`` the next start would use the checkpoint of step 4 of the old
    branch.
    """
    settings = {"checkpoint__every": "2", "checkpoint__keep_last": 9}
    TinyRun(tmp_path / "run", data, stop_after=4, **settings)
    back = tmp_path / "run" / "checkpoints" / "step-00000002"

    def dies(self: LocalEngine, *arguments: Any) -> None:
        raise RuntimeError("died")

    with monkeypatch.context() as context:
        context.setattr(LocalEngine, "train_step", dies)
        with pytest.raises(RuntimeError, match="died"):
            TinyRun(
                tmp_path / "run", data, config=lambda config: setattr(config, "resume", str(back)), **settings
            )
    left = tmp_path / "run" / "attempts" / "001"
    assert [path.name for path in (left / "checkpoints").iterdir()] == ["step-00000004"]
    assert open_reader(left / "checkpoints" / "step-00000004").step == 4
    assert open_reader(tmp_path / "run").step == 2
    resumed = TinyRun(tmp_path / "run", data, **settings)
    assert resumed.rows() == whole.rows()
    assert equal_tensors(resumed.state(), whole.state())
    assert [row["step"] for row in read_jsonl(left / "metrics.jsonl")] == [3, 4]
    assert sorted(path.name for path in resumed.directory.checkpoints.glob("step-*")) == [
        f"step-0000000{step}" for step in (2, 4, 6)
    ]


def test_refused_start_moves_no_checkpoints(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TinyRun(tmp_path / "run", data, stop_after=4, checkpoint__every="2")
    back = tmp_path / "run" / "checkpoints" / "step-00000002"

    def refuses(self: LocalEngine, reader: Any) -> None:
        raise CheckpointError(Problem("resume", "seen", "rule", "remedy"))

    monkeypatch.setattr(LocalEngine, "load", refuses)
    with pytest.raises(CheckpointError):
        TinyRun(tmp_path / "run", data, config=lambda config: setattr(config, "resume", str(back)))
    assert open_reader(tmp_path / "run").step == 4


def test_full_disk_leaves_its_step_in_the_status(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``status.json`` is written once a second, but the step of the failure is written in any case."""
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
        TinyRun(tmp_path / "run", data, checkpoint__every="2")
    status = RunDirectory(tmp_path / "run").status()
    assert status is not None
    assert status.step == 4
    assert status.checkpoint is not None
    assert status.checkpoint.endswith("step-00000002")


def test_starting_a_finished_run_changes_nothing(whole: TinyRun, data: Path, tmp_path: Path) -> None:
    again = TinyRun(copied(whole.directory.path, tmp_path), data)
    assert again.code is ExitCode.DONE
    assert again.rows() == whole.rows()
    assert again.evals() == whole.evals()


def test_the_export_opens_in_transformers_and_continues_a_prompt(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def wanted(config: RunConfig) -> None:
        config.checkpoint.export, config.monitor.prompt = True, "def main(args):"

    start = TinyRun(tmp_path / "run", data, config=wanted, plot=True)
    model = AutoModelForCausalLM.from_pretrained(start.directory.export)
    weights = {f"weight:{name}": parameter.detach() for name, parameter in model.named_parameters()}
    state = start.state()
    assert equal_tensors(weights, {key: state[key] for key in state if key.startswith("weight:")})
    tokenizer = AutoTokenizer.from_pretrained(start.directory.export)
    assert tokenizer.decode(tokenizer("def main").input_ids) == "def main"
    messages = "\n".join(caplog.messages)
    row = read_jsonl(start.directory.eval_file)[-1]
    assert f"\nvalidation loss: {row['loss']:.4f} nats a token (a unigram model: " in messages
    assert "the model continues 'def main(args):'" in messages
    last = messages.strip().splitlines()[-4:]
    assert last[0] == f"saved in {tmp_path / 'run'}: metrics.jsonl, checkpoints, plots/loss.png, export"
    assert last[1].endswith(f"python -m toolkit.launch.report {tmp_path / 'run'}")
    assert last[2].startswith("    generate text: python -m toolkit.launch.generate ")
    assert "train.steps=12" in last[3]

    from launch.generate import main

    command = [str(tmp_path / "run"), "def main(args):", "--tokens", "8", "--temperature", "0"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert first.startswith("def main(args):")
    assert main([*command, "--weights", str(start.directory.export)]) == 0
    assert capsys.readouterr().out == first
    assert main([str(tmp_path / "nowhere"), "x"]) == 2


def test_fork_inherits_state_and_steps_and_may_change_settings(
    stopped: Path, data: Path, tmp_path: Path
) -> None:
    def forked(config: RunConfig) -> None:
        config.run.fork, config.optim.lr = str(stopped), 5e-4

    fork = TinyRun(tmp_path / "fork", data, config=forked)
    assert [row["step"] for row in fork.rows()] == [4, 5, 6]
    assert fork.rows()[0]["lr"] == 5e-4
    assert fork.rows()[0]["loss"] < math.log(264)


@pytest.mark.full
def test_fork_with_a_doubled_batch_continues_at_the_next_sample(
    stopped: Path, data: Path, tmp_path: Path
) -> None:
    """At a learning rate of 0, a step of 16 samples has the mean loss of the two steps of 8 of the parent."""

    def forked(config: RunConfig) -> None:
        config.run.fork, config.optim.lr, config.model.dropout = str(stopped), 0.0, 0.0

    def doubled(config: RunConfig) -> None:
        forked(config)
        config.train.global_batch *= 2

    single, double = (
        TinyRun(tmp_path / name, data, config=change, train__steps=7)
        for name, change in (("8", forked), ("16", doubled))
    )
    losses = [row["loss"] for row in single.rows()]
    pairs = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert [row["loss"] for row in double.rows()][:2] == pytest.approx(pairs, abs=1e-6)
    assert min(abs(a - b) for a, b in itertools.pairwise(losses)) > 1e-3, "the samples differ"

    part = TinyRun(tmp_path / "part", data, stop_after=2, config=doubled, train__steps=7)
    assert open_reader(part.directory.path).scalars["consumed_samples"] == 3 * 8 + 2 * 16
    assert TinyRun(tmp_path / "part", data, config=doubled, train__steps=7).rows() == double.rows()


def test_resume_with_other_data_is_refused(stopped: Path, data: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.py").write_text(f"print({number})\n" * 100)
    ensure_stdlib(tmp_path / "other", 264, root=texts)
    with pytest.raises(CheckpointError, match=r"data=.*the checkpoint has data="):
        TinyRun(copied(stopped, tmp_path), tmp_path / "other")


def test_run_starts_from_published_weights(whole: TinyRun, data: Path, tmp_path: Path) -> None:
    def pretrained(config: RunConfig) -> None:
        config.model.pretrained = str(whole.directory.export)

    tuned = TinyRun(tmp_path / "tuned", data, stop_after=1, config=pretrained)
    assert tuned.rows()[0]["loss"] < whole.rows()[0]["loss"] - 0.05


# ---- waiting for data


def stall_share(start: TinyRun) -> float:
    rows = read_jsonl(start.directory.metrics_file)[1:]
    return sum(row["data_seconds"] for row in rows) / sum(row["step_seconds"] for row in rows)


def test_slow_loader_shows_in_metrics_and_summary(
    whole: TinyRun,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Reading takes ten times as long as a step. The control is the same run without the delay."""
    read = TokenWindows.read
    delay = 0.1 + 10 * statistics.median(
        row["step_seconds"] for row in read_jsonl(whole.directory.metrics_file)
    )

    def slow(self: TokenWindows, epochs: Any, numbers: Any) -> Any:
        time.sleep(delay)
        return read(self, epochs, numbers)

    monkeypatch.setattr(TokenWindows, "read", slow)
    monkeypatch.setattr(stream_module, "READ_CHUNK_BYTES", 0)  # a step at a time
    monkeypatch.setattr(stream_module, "CHUNKS_AHEAD", 1)
    delayed = TinyRun(tmp_path / "run", data)
    assert delayed.rows() == whole.rows()
    assert stall_share(delayed) > 0.5 > 0.1 > stall_share(whole)
    share = re.search(r"([\d.]+)% of it waiting for data", caplog.text)
    assert share is not None
    assert float(share[1]) == pytest.approx(100 * stall_share(delayed), abs=0.01)
