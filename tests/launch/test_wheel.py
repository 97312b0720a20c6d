"""The built wheel in an environment without the repository: configuration, commands and new projects.

pytest tests/launch/test_wheel.py
pytest tests/launch/test_wheel.py -m full      launchers, ZeRO 2, a sweep, verify, and the other installations
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.processes import ROOT

SOURCES = ("conf", "hydra_plugins", "launch", "toolkit", "pyproject.toml", "README.md", "LICENSE")
# Raises, and writes the path to $READ_LOG, if a process reads a file of the repository (except its .venv).
GUARD = f"""
import os, sys

def watch(event, arguments, root={str(ROOT) + os.sep!r}, packages={str(ROOT / ".venv") + os.sep!r}):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str):
        path = os.path.abspath(arguments[0])
        if (path + os.sep).startswith(root) and not path.startswith(packages):
            log = os.open(os.environ["READ_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(log, (path + "\\n").encode())
            raise PermissionError(f"the repository was read: {{path}}")

sys.addaudithook(watch)
"""


@dataclass(frozen=True)
class Installation:
    """A virtual environment with the toolkit, and the packages that it needs from the tests' environment."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def read_log(self) -> Path:
        return self.folder / "read.txt"

    def run(self, *command: str, cwd: Path, code: int = 0) -> str:
        """Run a program of the environment and return its output."""
        removed = {"PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "DMT_COMMAND_FORM"}
        environ = {name: value for name, value in os.environ.items() if name not in removed}
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=cwd,
            env={
                **environ,
                **{"PATH": f"{self.bin}:{environ['PATH']}", "READ_LOG": str(self.read_log)},
                **{"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            },
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        output = done.stdout + done.stderr
        assert done.returncode == code, output
        assert not self.read_log.exists(), self.read_log.read_text()
        return output


def copy_sources(folder: Path) -> Path:
    """Building writes next to the sources, and leftovers of an earlier build would enter a wheel."""
    for name in SOURCES:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder


def pip(*arguments: str, python: Path | None = None) -> None:
    command = [sys.executable, "-m", "pip", *(["--python", str(python)] if python else []), *arguments]
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    environ = {**os.environ, "PYTHONPATH": "", "READ_LOG": os.devnull}
    done = subprocess.run(
        [*command, *quiet],
        cwd=os.path.sep,  # not the repository
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def make_environment(folder: Path) -> Installation:
    """An empty environment whose packages are those of this one, without its own installation of the toolkit:
    a .pth file does not process those in the folder that it names.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (packages / "sitecustomize.py").write_text(GUARD)
    for launcher in ("torchrun", "deepspeed"):
        module = {"torchrun": "torch.distributed.run", "deepspeed": "deepspeed.launcher.runner"}[launcher]
        script = f"#!{folder}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
        (folder / "bin" / launcher).write_text(script)
        (folder / "bin" / launcher).chmod(0o755)
    return Installation(folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    pip(
        "wheel",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder / "dist"),
        str(copy_sources(folder / "src")),
    )
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    found = make_environment(tmp_path_factory.mktemp("environment") / "venv")
    pip("install", str(wheel), python=found.bin / "python")
    return found


@pytest.fixture(scope="module")
def project(installed: Installation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project from ``dmt new``, with its data, after six steps on one rank."""
    folder = tmp_path_factory.mktemp("elsewhere")
    assert "train it: cd mine && dmt train +exp=first" in installed.run("dmt", "new", "mine", cwd=folder)
    output = installed.run("dmt", "train", *KEYS, "engine=local", "train.steps=6", cwd=folder / "mine")
    assert f"project {folder / 'mine'}: conf has its groups and experiments" in output
    assert "report:        dmt report runs/first-" in output
    return folder / "mine"


KEYS = (
    *("+exp=first", "schedule.warmup=2", "train.global_batch=8", "eval.every=0", "checkpoint.every=never"),
    *("debug.threads=1", "cluster.gpus_per_node=0"),
)


def run_of(project: Path) -> Path:
    (found,) = (project / "runs").glob("first-*")
    return found


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"toolkit/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    expected |= {f"toolkit/launch/{path.name}" for path in (ROOT / "launch").glob("*.py")}
    kinds = (".py", ".json", ".j2", ".css", ".js", ".bash", ".zsh", ".fish", ".yaml", ".md", ".toml", "")
    package = [path for path in (ROOT / "toolkit").rglob("*") if path.is_file() and path.suffix in kinds]
    replaced = {"toolkit/conf/__init__.py", "toolkit/launch/__init__.py"}
    expected |= {str(path.relative_to(ROOT)) for path in package} - replaced
    expected = {name for name in expected if "__pycache__" not in name}
    assert not expected - names
    assert not names & replaced
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "build/"))]


def test_guard_sees_a_file_of_the_repository(tmp_path: Path) -> None:
    """The control of every test below."""
    guarded = make_environment(tmp_path / "venv")
    code = f"open({str(ROOT / 'pyproject.toml')!r})"
    with pytest.raises(AssertionError, match="the repository was read"):
        guarded.run("python", "-c", code, cwd=tmp_path)
    assert guarded.read_log.read_text() == f"{ROOT / 'pyproject.toml'}\n"


@pytest.mark.full
def test_new_project_trains_resumes_and_reports(installed: Installation, project: Path) -> None:
    run = run_of(project)
    assert steps(run) == list(range(1, 7))
    output = installed.run(
        *("python", "-m", "toolkit.launch.train", *KEYS, "engine=local", "train.steps=9"), cwd=project
    )
    assert "6 steps and 48 samples are done" in output
    assert "report:        python -m toolkit.launch.report runs/first-" in output
    assert steps(run) == list(range(1, 10))
    assert "the report is in" in installed.run("dmt", "report", "runs/first", cwd=project)
    assert (run / "report.html").is_file()


@pytest.mark.full
def test_commands_answer_in_a_folder_of_the_project(installed: Installation, project: Path) -> None:
    below = project / "conf/exp"
    assert "mine.model.CausalConvolutions" in installed.run("dmt", "plan", "+exp=first", cwd=below)
    assert "dmt doctor --json" in installed.run("dmt", "doctor", "--help", cwd=below)
    output = installed.run("dmt", "plan", "+exp=first", "zero=stage9", cwd=below, code=2)
    assert "remedy: write zero=stage" in output
    assert "write dmt train -m" in installed.run("dmt", "plan", "+exp=first", "-m", cwd=below, code=2)


# -- everything else


@pytest.mark.full
@pytest.mark.timeout(600)
def test_launchers_continue_the_run_as_modules(installed: Installation, project: Path) -> None:
    launchers: Sequence[tuple[str, ...]] = (
        ("dmt", "train", "cluster.cpu_ranks=2"),
        ("torchrun", "--nproc_per_node", "2", "-m", "toolkit.launch.train"),
        ("deepspeed", "--num_gpus", "2", "--module", "toolkit.launch.train"),
    )
    for number, launcher in enumerate(launchers):
        total = 12 + number
        output = installed.run(*launcher, *KEYS, "zero=stage2", f"train.steps={total}", cwd=project)
        hint = "dmt report" if launcher[0] == "dmt" else "python -m toolkit.launch.report"
        assert f"report:        {hint} runs/first-" in output, output
        assert steps(run_of(project)) == list(range(1, total + 1))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_project_in_an_empty_folder_prepares_its_data(installed: Installation, tmp_path: Path) -> None:
    installed.run("dmt", "new", "fresh", cwd=tmp_path)
    installed.run("dmt", "train", "+exp=first", "train.steps=20", cwd=tmp_path / "fresh")
    (run,) = (tmp_path / "fresh/runs").glob("first-*")
    rows = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1] < rows[0] - 0.2
    installed.run("python", "-m", "pytest", "-p", "no:cacheprovider", "tests", cwd=tmp_path / "fresh")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_sweep_trains_two_points(installed: Installation, project: Path) -> None:
    words = ("engine=local", "train.steps=3", "optim.lr=1e-3,3e-3", "sweep.dir=sweeps/two")
    output = installed.run("dmt", "train", "-m", *KEYS, *words, cwd=project)
    assert "best: optim.lr=" in output
    points = sorted(path.parent for path in (project / "sweeps/two").glob("*/metrics.jsonl"))
    assert [len(steps(point)) for point in points] == [3, 3]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_jobs_start_the_module(installed: Installation, project: Path) -> None:
    words = ("cluster=slurm", "cluster.cpu_ranks=2", "cluster.nodes=2", "dry_run=true")
    script = installed.run("dmt", "submit", *KEYS, *words, cwd=project)
    assert "train=(-m toolkit.launch.train --frozen=" in script


@pytest.mark.full
@pytest.mark.timeout(600)
def test_verify_compares_a_cell(installed: Installation, tmp_path: Path) -> None:
    cell = "deepspeed/llama/dp2-zero2"
    assert cell in installed.run("dmt", "verify", "--list", cwd=tmp_path).split()
    installed.run("dmt", "verify", "--cpu", "--cells", cell, cwd=tmp_path)
    assert cell in (tmp_path / "parity.md").read_text()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["editable", "checkout"])
def test_other_installations_find_configuration_and_commands(form: str, tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "src")
    found = make_environment(tmp_path / "venv")
    if form == "editable":
        pip("install", "--no-build-isolation", "--editable", str(source), python=found.bin / "python")
        assert "zero=" in found.run("dmt", "plan", "--help", cwd=tmp_path)
    else:
        packages = next(found.folder.glob("lib/python*/site-packages"))
        (packages / "checkout.pth").write_text(f"{source}\n")
    code = (
        "import toolkit.conf; from toolkit.launch import train; print(toolkit.conf.__path__, train.__file__)"
    )
    output = found.run("python", "-c", code, cwd=tmp_path)
    assert output.split() == [f"['{source / 'conf'}']", str(source / "launch/train.py")]
    found.run("python", "-m", "toolkit.launch.plan", "+exp=quickstart", cwd=tmp_path)
    output = found.run("python", "src/launch/plan.py", "-m", cwd=tmp_path, code=2)
    assert "write python src/launch/train.py -m" in output
