"""``from toolkit import load_config, plan, train``: several trainings in one process, which stays as it was.

pytest tests/launch/test_api.py
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.launch.processes import BIN, ROOT
from tests.launch.tiny_runs import KEYS, STEPS
from toolkit import TrainResult, load_config, plan, train
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, UserError
from toolkit.logs import ROOT as LOGGER
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState


def tiny(run: Path, data: Path, *more: str) -> RunConfig:
    return load_config(*KEYS, "engine=local", f"data.path={data}", f"run.dir={run}", *more)


def losses(result: TrainResult) -> list[float]:
    return result.metrics["loss"].to_pylist()


def state_of_process() -> tuple[object, ...]:
    logger = logging.getLogger(LOGGER)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    streams = (sys.stdout, sys.stderr)
    return dict(os.environ), handlers, list(logger.handlers), logger.propagate, streams


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, toolkit; print([name for name in ('torch', 'hydra', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_packages_are_functions_and_still_packages() -> None:
    import toolkit.plan.types

    assert toolkit.plan.types.RunPlan.__name__ == "RunPlan"
    assert callable(plan)
    assert callable(train)
    assert set(toolkit.__all__) <= {name for name in toolkit.__all__ if hasattr(toolkit, name)}


def test_plan_starts_nothing(tmp_path: Path, data: Path) -> None:
    config = tiny(tmp_path / "run", data)
    planned = plan(config)
    assert (planned.run_dir, planned.config.train.steps) == (str(tmp_path / "run"), STEPS)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"train\.steps"):
        load_config("train.steps=-1")


@pytest.mark.full
def test_compiled_training_on_cpus_is_compiled(tmp_path: Path, data: Path) -> None:
    from torch._dynamo.utils import counters

    graphs = {}
    for mode in ("none", "layers"):
        counters.clear()
        train(tiny(tmp_path / mode, data, f"compile={mode}", "compile.backend=aot_eager"))
        graphs[mode] = counters["stats"]["unique_graphs"]
    assert graphs["none"] == 0
    assert graphs["layers"] > 0


def test_resumed_training_equals_an_uninterrupted_one(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state_of_process()
    whole = train(tiny(tmp_path / "whole", data))
    config = tiny(tmp_path / "parts", data, "train.steps=3")
    part = train(config)
    assert (part.state, part.step, part.reason) == ("done", 3, None)
    config.train.steps = STEPS
    parts = train(config)
    assert losses(parts) == losses(whole)
    assert parts.loss == losses(whole)[-1]
    assert parts.metrics["step"].to_pylist() == list(range(1, STEPS + 1))
    assert parts.checkpoint == tmp_path / f"parts/checkpoints/step-{STEPS:08d}"
    assert state_of_process() == before
    assert not torch.distributed.is_initialized()
    printed = capsys.readouterr().out
    assert printed.count(f"run {tmp_path / 'whole'}, attempt 1: 1 rank on cpu\n") == 1, (
        "logging is not doubled"
    )
    control = train(tiny(tmp_path / "other", data, "train.seed=1"))
    assert losses(control) != losses(whole), "the control: another seed"


def test_finished_run_is_not_trained_again(tmp_path: Path, data: Path) -> None:
    config = tiny(tmp_path / "run", data, "train.steps=2")
    first, second = train(config), train(config)
    assert (second.state, second.step, losses(second)) == ("done", 2, losses(first))
    assert RunDirectory(tmp_path / "run").attempts() == [1]


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Python's own handler of SIGINT, which a process that a shell started in the background ignores."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_saves_and_returns_a_stopped_result(tmp_path: Path, data: Path) -> None:
    before = state_of_process()
    config = tiny(tmp_path / "run", data, "train.steps=1000000", "checkpoint.every=never")
    metrics = RunDirectory(tmp_path / "run").metrics_file

    def interrupt() -> None:
        while not metrics.exists() or not metrics.read_text():
            pass
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = train(config)
    thread.join()
    assert (result.state, result.reason) == ("stopped", "SIGINT")
    assert result.checkpoint is not None
    assert result.checkpoint.name == f"step-{result.step:08d}"
    assert state_of_process() == before
    with pytest.raises(KeyboardInterrupt):  # afterwards Ctrl-C is what it was
        signal.raise_signal(signal.SIGINT)


def test_error_of_the_user_is_raised_and_the_next_training_works(tmp_path: Path, data: Path) -> None:
    before = state_of_process()
    with pytest.raises(ConfigError, match="no launcher started this process"):
        train(tiny(tmp_path / "ranks", data, "cluster.cpu_ranks=2"))
    assert not (tmp_path / "ranks").exists()
    with pytest.raises(UserError, match=r"data\.path"):
        train(tiny(tmp_path / "run", tmp_path / "nothing"))
    status = RunDirectory(tmp_path / "run").status()
    assert status is not None
    assert status.state is RunState.REFUSED
    assert state_of_process() == before
    assert train(tiny(tmp_path / "run", data, "train.steps=1")).state == "done"


def test_exception_of_the_users_model_passes_with_the_process_restored(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks.py").write_text(
        "from torch import nn\n\n\nclass Broken(nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(2, 2)\n\n"
        "    def forward(self, input_ids, labels):\n        raise ArithmeticError('in the model')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = state_of_process()
    keys = [key for key in KEYS if not key.startswith("model")]
    with pytest.raises(ArithmeticError, match="in the model"):
        train(
            load_config(
                *keys,
                *("model=custom", "model.target=breaks.Broken", "engine=local"),
                *(f"data.path={data}", f"run.dir={tmp_path / 'run'}"),
            )
        )
    assert state_of_process() == before
    assert not torch.distributed.is_initialized()
    status = RunDirectory(tmp_path / "run").status()
    assert status is not None
    assert (status.state, status.exit_code) == (RunState.FAILED, 1)
    assert "ArithmeticError: in the model" in (status.reason or "")


@pytest.mark.full
def test_result_of_a_diverged_run(tmp_path: Path, data: Path) -> None:
    result = train(tiny(tmp_path / "run", data, "optim.lr=1e30", "optim=sgd", "optim.clip=0"))
    assert result.state == "diverged"
    assert "not finite" in (result.reason or "")
    assert math.isnan(result.loss) or math.isinf(result.loss) or result.step < STEPS


SCRIPT = """\
import os
import sys
from toolkit import load_config, train
for steps in (2, 4):
    result = train(load_config(*sys.argv[1:], f"train.steps={steps}"))
    assert (result.state, "WANDB_MODE" in os.environ) == ("done", False)
if result.step != 4 and os.environ["RANK"] == "0":
    raise SystemExit(f"{result.step} steps")
try:
    train(load_config(*sys.argv[1:], "parallel.tensor=3"))
except ValueError as error:
    print(f"rank {os.environ['RANK']}: {str(error).splitlines()[0]}")
"""


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_script_under_a_launcher_trains_twice(launcher: str, tmp_path: Path, data: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ranks = "--nproc_per_node" if launcher == "torchrun" else "--num_gpus"
    keys = [*KEYS, "zero=stage2", f"data.path={data}", f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [str(BIN / launcher), ranks, "2", "script.py", *keys],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0: error: 2 ranks, parallel.tensor=3" in done.stdout
    assert "rank 1: error: another rank found a mistake" in done.stdout
    rows = RunDirectory(tmp_path / "run").metrics_file.read_text().splitlines()
    assert len(rows) == 4
