"""``launch/submit.py``: dry runs and errors. Real submissions are in test_slurm.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.submit import main
from tests.launch.processes import ROOT

SUBMIT = str(ROOT / "launch" / "submit.py")
WORDS = (
    "+exp=quickstart",
    "cluster=slurm",
    "cluster.nodes=4",
    "cluster.gpus_per_node=8",
    "cluster.gpu=h100",
    "train.global_batch=32",
)


def submit(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SUBMIT, *words], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def test_dry_run_prints_files_and_writes_nothing(tmp_path: Path) -> None:
    done = submit(*WORDS, 'cluster.slurm.options={comment: "it\'s mine"}', "dry_run=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in (
        "/jobs/001/config.yaml",
        "/jobs/001/job.sh",
        "where: slurm",
        "#!/bin/bash",
        "\nsbatch --parsable --job-name=quickstart-",
        "--nodes=4",
        "--gres=gpu:8",
        "'--comment=it'\"'\"'s mine'",
    ):
        assert part in done.stdout, part
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dry_run=perhaps",), "dry_run must be true or false"),
        (("parallel.tensor=3", "engine=megatron"), "parallel.tensor=3"),
        (("cluster.slurm.time=soon", "dry_run=true"), "cluster.slurm.time=soon"),
        (("cluster.slurm.time=soon",), "cluster.slurm.time=soon"),
    ],
)
def test_submit_rejects_mistakes_before_writing(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_submit_imports_neither_torch_nor_engines(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.argv = ['submit.py', *{[*WORDS, 'dry_run=true']!r}]\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from launch import submit; submit.main(sys.argv[1:])\n"
        "heavy = ('torch', 'deepspeed', 'transformers', 'wandb')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip().splitlines()[-1] == "[]"
