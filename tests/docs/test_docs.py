"""Check README.md, CONTRIBUTING.md and docs/: commands, Python blocks, names and links.

pytest tests/docs                 every block is checked; the longest command of each page plans, two run
pytest tests/docs -m full         every command plans; every block runs, in order, in one folder per page
"""

from __future__ import annotations

import ast
import email
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from launch import adopt
from tests.cluster.sweep_points import LAPTOP, points
from tests.docs.conftest import SHORT_SAMPLES
from tests.docs.pages import ALL_BLOCKS, COMMANDS, PAGES, ROOT, Command, blocks_of, commands_of, read_blocks
from toolkit.cluster.jobs.job import plan_job
from toolkit.commands import in_this_form
from toolkit.config.compose import compose, compose_plan_arguments, compose_prepare, compose_reshard
from toolkit.config.overrides import parse_overrides
from toolkit.config.plan_arguments import PlanArguments
from toolkit.config.roots import PREPARE, RESHARD, RUN
from toolkit.data.tokens import stdlib
from toolkit.plan.schedule import scheduled_rate
from toolkit.plan.transformer_engine import NEWEST
from toolkit.plan.types import RunPlan

LANGUAGES = {"sh", "python", "yaml", "json", "text"}

# Commands that the full test does not run: a pattern, and why. Their options are checked nevertheless.
NOT_RUN = {
    r"^git clone ": "needs the network",
    r"^make (test|lint|story|campaign)\b": "is run by CI itself",
    r"^make (gpu|test-gpu)\b": "needs a GPU",
    r"^python launch/train\.py \+exp=gpt2_125m\b": "needs GPUs",
    r"^(make wheel|pip install)\b": "is tests/launch/test_wheel.py",
    r"^(\.venv/bin/)?(python -m )?pytest ": "is a test",
    r"^dmt new mine && ": "is tests/launch/test_new.py",
    r"^dmt adopt ds_config\.json training_args": "is tests/adopt",
    r"^python benchmarks/": "is a benchmark",
    r"^python launch/verify\.py": "is tests/engine/test_matrix.py",
    r"^python launch/calibrate\.py": "is tests/launch/test_calibrate.py",
    r"cluster\.calibration=": "needs a calibration of the machine",
    r"^(docker|apptainer|make image)": "needs Docker, Apptainer or root",
    r"cluster=(slurm|kubernetes)(?!.*dry_run=true)": "needs a cluster",
    r"--nnodes|--node_rank|--hostfile": "needs several machines",
    r"s3://|https://|allenai/c4": "needs an object store or the Hugging Face hub",
    r"source=theirs/": "needs a checkpoint of another program",
    r"hydra/sweeper=optuna": "needs the package hydra-optuna-sweeper",
}
PYTHON = [block for block in ALL_BLOCKS if block.language == "python"]
OF_PROJECT = "+exp=first"  # the experiment of a new project: tests/launch/test_new.py
SCRIPTS = {"train", "plan", "doctor", "submit"}


def why_not_run(command: Command) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command.text)), None)


# -- every block is one that these tests know


def test_every_fence_names_its_language() -> None:
    assert [block.id for block in ALL_BLOCKS if block.language not in LANGUAGES] == []


def test_no_command_stands_outside_a_shell_block() -> None:
    """An indented block would escape the tests."""
    indented = re.compile(r"^(    |\t)(python|deepspeed|torchrun|make) ", re.MULTILINE)
    assert [page.name for page in PAGES if indented.search(page.read_text(encoding="utf-8"))] == []


def test_every_exception_is_used() -> None:
    for pattern in NOT_RUN:
        assert any(re.search(pattern, command.text) for command in COMMANDS), pattern


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


# -- shell


def test_shell_blocks_parse() -> None:
    for block in ALL_BLOCKS:
        if block.language == "sh":
            text = re.sub(r"<[a-z ]+>", "PLACEHOLDER", block.text)
            done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{block.id}: {done.stderr}"


@pytest.fixture
def experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages ask the reader to save, where data=stdlib is a small package."""
    monkeypatch.chdir(tmp_path)
    read = stdlib.read_source_texts
    monkeypatch.setattr(stdlib, "read_source_texts", lambda root: read(Path(email.__file__).parent))
    for block in ALL_BLOCKS:
        if block.file:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    return tmp_path


def composed_words(command: Command) -> tuple[str, list[str]] | None:
    """The script and the words that it composes; None if it composes nothing, or a file of the reader."""
    found = command.launch()
    assert found is not None
    name, words = found
    assert (ROOT / "launch" / f"{name}.py").is_file()
    if {"--help", "-h", OF_PROJECT} & set(words) or any(word.startswith("--frozen") for word in words):
        return None
    words = words[: words.index(">")] if ">" in words else words
    return name, [word for word in words if word not in ("--json", "--trace", "dry_run=true")]


LAUNCHED: dict[str, list[Command]] = {}  # by page, each command once
for command in {command.text: command for command in COMMANDS if command.launch()}.values():
    if composed_words(command) is not None:
        LAUNCHED.setdefault(command.block.page, []).append(command)


def test_every_argument_is_known(experiments: Path) -> None:
    """Keys, groups, options and types; whether values fit together shows only in a plan."""
    roots = dict.fromkeys(SCRIPTS, RUN) | {"prepare": PREPARE, "reshard": RESHARD}
    of_plan = {field.name for field in fields(PlanArguments)}
    for command in (command for commands in LAUNCHED.values() for command in commands):
        name, words = composed_words(command) or ("", [])
        if name in roots and "-m" not in words:
            parse_overrides([word for word in words if word.partition("=")[0] not in of_plan], roots[name])


def check_plan(command: Command, experiments: Path) -> None:
    """Compose and plan a command. A plan has no warning."""
    name, words = composed_words(command) or ("", [])
    if name == "prepare":
        compose_prepare(words)
    elif name == "adopt":
        assert adopt.main(words) == 0
    elif name == "reshard":
        compose_reshard(words)
    elif "-m" in words:
        if "hydra/sweeper=optuna" not in words and "cluster=slurm" not in words:
            planned = points(*[word for word in words if word != "-m"], folder=experiments)
            assert planned
            assert [point.problems for point in planned] == [()] * len(planned)
    elif name in SCRIPTS:
        config = compose(compose_plan_arguments(words)[1] if name == "plan" else words)
        if config.model.pretrained is None and config.data.name != "dataset":
            # without it, Megatron-core's layers are slower
            machine = replace(LAPTOP, transformer_engine=NEWEST)
            assert plan_job(config, machine).warnings == (), command.id


@pytest.mark.parametrize("page", LAUNCHED)
def test_longest_command_of_a_page_plans_without_a_warning(page: str, experiments: Path) -> None:
    check_plan(max(LAUNCHED[page], key=lambda command: len(command.text)), experiments)


@pytest.mark.full
@pytest.mark.parametrize("page", LAUNCHED)
def test_every_command_of_a_page_plans_without_a_warning(page: str, experiments: Path) -> None:
    for command in LAUNCHED[page]:
        check_plan(command, experiments)


def test_the_migration_page_shows_the_experiment_that_adopt_prints(
    experiments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = next(command for command in COMMANDS if " launch/adopt.py " in command.text)
    assert adopt.main(command.argv[2:]) == 0
    shown = (experiments / "mine/exp/adopted.yaml").read_text(encoding="utf-8")
    assert capsys.readouterr().out == in_this_form(shown)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for command in COMMANDS:
        if command.argv[0] == "make" and len(command.argv) > 1:
            assert command.argv[1] in targets | {"docs"}, command.id


def test_make_train_is_the_command_that_the_pages_describe() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ntrain: ")[2].splitlines()[1]
    assert recipe.endswith("$(BIN)/deepspeed --quiet $(LAUNCH_RANKS) launch/train.py +exp=quickstart $(ARGS)")


def trainings(page: str) -> Iterator[RunPlan]:
    """The plan of each command of a page that trains one run, in order."""
    for command in COMMANDS:
        found = command.launch()
        if command.block.page != page or found is None or found[0] != "train" or why_not_run(command):
            continue
        if not {"-m", "--help", OF_PROJECT} & set(found[1]) and not any(
            "--frozen" in word for word in found[1]
        ):
            yield plan_job(compose(found[1]), LAPTOP)


@pytest.mark.parametrize("page", ["README.md", "docs/getting_started.md", "docs/tutorials/switch_engines.md"])
def test_every_training_has_steps_left(page: str) -> None:
    """A command shares a run directory with an earlier one only to continue the run."""
    steps: dict[str, int] = {}
    for plan in trainings(page):
        assert plan.config.train.steps > steps.get(plan.run_dir, 0), plan.run_dir
        steps[plan.run_dir] = plan.config.train.steps


def test_the_engine_tutorial_keeps_one_run_and_one_schedule() -> None:
    hops = [plan for plan in trainings("docs/tutorials/switch_engines.md") if plan.config.run.name == "hop"]
    assert len(hops) == 3
    assert len({plan.run_dir for plan in hops}) == 1
    for before, after in pairwise(hops):
        step = before.config.train.steps
        assert scheduled_rate(before.config, step - 1) == scheduled_rate(after.config, step - 1)
    control = compose(["+exp=quickstart", f"train.steps={hops[0].config.train.steps}"])
    step = hops[0].config.train.steps - 1
    assert scheduled_rate(control, step) != scheduled_rate(hops[0].config, step), (
        "without schedule.decay the rate follows train.steps"
    )


CHEAP = [
    next(command for command in COMMANDS if pattern in command.text)
    for pattern in ("launch/plan.py +exp=", "launch/train.py --help")
]


@pytest.mark.parametrize("command", CHEAP, ids=lambda command: command.id)
def test_cheap_commands_run(command: Command, clone: Path, environ: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-c", command.text], cwd=clone, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def squeezed(text: str) -> str:
    """``text`` without the lines of tables, and with one space between words."""
    return " ".join(re.sub(r"[\u2500-\u257f]", " ", text).split())


@pytest.mark.parametrize(
    "page", ["docs/estimate.md", pytest.param("docs/scaling.md", marks=[pytest.mark.full])]
)
def test_output_on_the_page_is_what_its_command_prints(
    page: str, clone: Path, environ: dict[str, str]
) -> None:
    blocks = blocks_of(ROOT / page)
    shown = next(number for number, block in enumerate(blocks) if block.language == "text")
    (command,) = commands_of(blocks[shown - 1])
    done = subprocess.run(
        ["bash", "-c", command.text],
        cwd=clone,
        env=environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    for part in blocks[shown].text.split("\n\n"):
        assert squeezed(part) in squeezed(done.stdout)


# -- Python


def missing_imports(text: str) -> list[str]:
    """The imports of a program that do not resolve, as ``module`` or ``module.name``."""
    missing = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            wanted = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            try:
                found = importlib.import_module(module)
            except ModuleNotFoundError:
                missing.append(module)
                continue
            if name is not None and not hasattr(found, name):
                try:
                    importlib.import_module(f"{module}.{name}")
                except ModuleNotFoundError:
                    missing.append(f"{module}.{name}")
    return missing


def test_python_compiles_and_imports_what_exists() -> None:
    for block in PYTHON:
        compile(block.text, block.id, "exec")
        assert missing_imports(block.text) == [], block.id


def test_a_module_that_was_moved_is_found() -> None:
    """The control: docs/checkpoints.md once imported a module that had been moved."""
    text = "from toolkit.checkpoint.store import CheckpointStore\nfrom toolkit.errors import NoSuchError\n"
    (block,) = read_blocks(f"```python\n{text}```\n", "control")
    assert missing_imports(block.text) == ["toolkit.checkpoint.store", "toolkit.errors.NoSuchError"]


# Other packages are not analyzed, which would take a minute.
MYPY = """\
[mypy]
ignore_missing_imports = true
follow_imports = silent
namespace_packages = false
[mypy-torch.*,transformers.*,deepspeed.*,megatron.*,numpy.*,datasets.*,wandb.*,matplotlib.*]
follow_imports = skip
"""


@pytest.mark.full
def test_python_type_checks(tmp_path: Path) -> None:
    """Undefined names count, so a block stands on its own."""
    files = []
    for number, block in enumerate(PYTHON):
        file = tmp_path / f"{Path(block.page).stem}_{number}.py"
        file.write_text(block.text, encoding="utf-8")
        files.append(str(file))
    settings = tmp_path / "mypy.ini"
    settings.write_text(MYPY, encoding="utf-8")
    command = [
        *(sys.executable, "-m", "mypy", "--config-file", str(settings)),
        *("--cache-dir", str(tmp_path / "cache"), *files),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_yaml_and_json_parse() -> None:
    for block in ALL_BLOCKS:
        if block.language == "yaml":
            assert yaml.safe_load(block.text), block.id
        elif block.language == "json":
            json.loads(block.text)


# -- names and links


def test_paths_exist() -> None:
    """Files of the repository that a page names in code."""
    ignored = ("conf/GROUP", "conf/exp/mine", "conf/exp/first", "tests/models/test_mine")
    named = re.compile(r"(?<![\w/.-])(?:toolkit|launch|benchmarks|tests|conf|hydra_plugins)/[\w/.-]*\w")
    missing = [
        (page.name, name)
        for page in PAGES
        for name in sorted(set(named.findall(page.read_text(encoding="utf-8"))))
        if not (ROOT / name).exists()
        and not name.startswith(ignored)
        and "NAME" not in name
        and "mine/" not in name
    ]
    assert missing == []


def test_modules_exist() -> None:
    """Dotted names of the toolkit in code: a module, or something in one."""
    named = re.compile(r"(?:`|^::: )(toolkit(?:\.\w+)+)", re.MULTILINE)
    for page in PAGES:
        for name in sorted(set(named.findall(page.read_text(encoding="utf-8")))):
            parts = name.split(".")
            ends = (end for end in (len(parts), len(parts) - 1, len(parts) - 2) if end)
            modules = [ROOT.joinpath(*parts[:end]) for end in ends]
            assert any(path.is_dir() or path.with_suffix(".py").is_file() for path in modules), name


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target) or target.startswith("#"):
                continue
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve()
            assert found.exists(), (page.name, target)
            if anchor and found.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in {
                    re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
                }, (page.name, target)


def test_every_page_is_in_the_navigation() -> None:
    """`mkdocs build --strict` checks more; this works without mkdocs."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in nav] == []


def test_the_import_picture_is_that_of_the_code() -> None:
    """docs/architecture.md lists the folders in the order in which they may import each other."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = text.partition("## Folders")[2].partition("```text\n")[2].partition("```")[0].splitlines()
    tree = ast.parse((ROOT / "tests/test_imports.py").read_text(encoding="utf-8"))
    (order,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == "ORDER"
    )
    for row, folders in zip(rows, order, strict=False):
        assert set(folders) <= set(row.split()), row


# -- every page, as a reader follows it

QUICKSTART = r"launch/train\.py (-m )?\+exp=quickstart"


def script(page: Path) -> str:
    """A shell script that does what the page shows, without the commands in ``NOT_RUN``, and with shorter
    samples in the experiment quickstart, except on the page that compares its losses.
    """
    quickstart = QUICKSTART if page.stem != "switch_engines" else "(?!)"
    lines = ["set -eo pipefail", "trap 'echo \"failed: $BASH_COMMAND\" >&2' ERR"]
    for block in blocks_of(page):
        if block.file:
            lines += [
                f"mkdir -p {shlex.quote(str(Path(block.file).parent))}",
                f"cat > {block.file} <<'END_OF_BLOCK'",
            ]
            lines += [block.text.rstrip("\n"), "END_OF_BLOCK"]
        elif block.language == "sh":
            for command in commands_of(block):
                if not why_not_run(command):
                    text = re.sub(quickstart, rf"\g<0> {SHORT_SAMPLES}", command.text)
                    lines += [f"echo {shlex.quote('+ ' + text)}", text]
        elif block.language == "python":
            lines += [f"echo '+ Python of {block.id}'", "python - <<'END_OF_BLOCK'"]
            lines += [block.text.rstrip("\n"), "END_OF_BLOCK"]
    return "\n".join(lines) + "\n"


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("launchers_port")
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if script(page).count("\n") > 2],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_block_of_the_page_runs(
    page: Path, clone: Path, environ: dict[str, str], prepared_stdlib: Path
) -> None:
    (clone / "data").mkdir()
    (clone / "data" / "stdlib").symlink_to(prepared_stdlib)
    done = subprocess.run(
        ["bash"], input=script(page), cwd=clone, env=environ, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert not re.search(r"Traceback|[A-Z][a-z]+Warning:", output), output
