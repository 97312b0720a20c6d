"""model.target: what is built, and the error for each mistake."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from toolkit.checkpoint.shard import WEIGHT, Box, Shard, TensorKey
from toolkit.config.model import ModelConfig
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError
from toolkit.models.build import build_model
from toolkit.models.initial_weights import InitialWeights
from toolkit.models.user_model import build_user_module
from toolkit.progress import set_progress_listener
from toolkit.testing.tiny import tiny_plan
from toolkit.user_code import check_user_code

HERE = "tests.models.broken"

MISTAKES = {
    "no package": ("nowhere_at_all.Model", {}, "no module nowhere_at_all"),
    "no module": ("tests.models.nowhere.Model", {}, "no module tests.models.nowhere"),
    "no class": (f"{HERE}.Fin", {}, f"the module {HERE} has no Fin\n.*\n.*write model.target={HERE}.Fine"),
    "not a class": (f"{HERE}.imported_elsewhere", {}, "it is a module"),
    "missing argument": (f"{HERE}.Fine", {}, r"\(none\).*width"),
    "wrong argument": (f"{HERE}.Fine", {"width": 2, "height": 3}, r"\(width, height\).*height"),
    "a function without annotation": (
        f"{HERE}.unannotated",
        {"command": "true"},
        "unannotated is not annotated to return",
    ),
    "a function of another type": (f"{HERE}.no_module", {}, "no_module is not annotated to return"),
    "a function that lies": (f"{HERE}.lying", {}, "returns a int"),
    "an annotation that cannot be resolved": (
        f"{HERE}.unresolved",
        {},
        "unresolved is not annotated to return",
    ),
    "a class that is no module": (f"{HERE}.NoModule", {}, "the class NoModule is not derived from"),
    "an object that can be called": (f"{HERE}.partial_of_fine", {}, "it is a partial"),
    "a function of a package": ("torch.hub.load", {"repo_or_dir": "x"}, "load is not annotated to return"),
    "Python's own library": ("subprocess.getoutput", {"cmd": "true"}, "belongs to Python's standard library"),
    "nothing to train": (f"{HERE}.NoParameters", {}, "no parameter"),
    "running statistics": (f"{HERE}.Normed", {}, r"inside.1 \(BatchNorm1d\)"),
}


@pytest.mark.parametrize(("target", "arguments", "shows"), MISTAKES.values(), ids=list(MISTAKES))
def test_errors_report_cause_and_remedy(target: str, arguments: dict[str, int], shows: str) -> None:
    with pytest.raises(ConfigError, match=shows) as caught:
        build_user_module(ModelConfig(target=target, arguments=arguments), 0)
    problem = caught.value.problems[0]
    assert problem.key == "model.target"
    assert problem.seen.startswith(f"model.target={target}")
    assert problem.rule
    assert problem.remedy


def test_annotated_function_is_accepted() -> None:
    assert isinstance(
        build_user_module(ModelConfig(target=f"{HERE}.annotated", arguments={"width": 2}), 0), torch.nn.Module
    )


@pytest.mark.parametrize("target", ["subprocess.getoutput", "os.system", "tests.models.broken.unannotated"])
def test_other_callables_are_never_called(target: str, tmp_path: Path) -> None:
    (argument,) = {"getoutput": ["cmd"], "system": ["command"], "unannotated": ["command"]}[
        target.rpartition(".")[2]
    ]
    with pytest.raises(ConfigError, match=r"model\.target"):
        build_user_module(ModelConfig(target=target, arguments={argument: f"touch {tmp_path}/mark"}), 0)
    assert not list(tmp_path.iterdir())


def test_type_error_inside_user_code_propagates() -> None:
    with pytest.raises(TypeError):
        build_user_module(ModelConfig(target=f"{HERE}.Unwell"), 0)


def test_import_error_inside_user_module_propagates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import a_package_that_is_missing\n\nclass Model: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        build_user_module(ModelConfig(target="half_installed.Model"), 0)


def test_module_in_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("from torch import nn\n\n\nclass Model(nn.Linear):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = build_user_module(
        ModelConfig(target="only_here.Model", arguments={"in_features": 2, "out_features": 3}), 0
    )
    assert module.weight.shape == (3, 2)


def test_module_in_nested_folders_without_init_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outer_only/inner").mkdir(parents=True)
    (tmp_path / "outer_only/inner/models.py").write_text("class Model: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_user_code(RunConfig(model=ModelConfig(target="outer_only.inner.models.Model")))
    with pytest.raises(ConfigError, match=r"there is no module outer_only\.absent"):
        check_user_code(RunConfig(model=ModelConfig(target="outer_only.absent.models.Model")))


def test_check_does_not_import_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "explosive"
    (package / "inner").mkdir(parents=True)
    for file in ("__init__.py", "inner/__init__.py", "inner/models.py"):
        (package / file).write_text("raise RuntimeError('imported')\n\nclass Model: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_user_code(RunConfig(model=ModelConfig(target="explosive.inner.models.Model")))
    check_user_code(RunConfig(model=ModelConfig()))
    for target, missing in {
        "explosive.inner.absent.Model": "explosive.inner.absent",
        "explosive.absent.models.Model": "explosive.absent",
        "explosive.inner.models.Outer.Model": "explosive.inner.models.Outer",
    }.items():
        with pytest.raises(ConfigError, match=f"there is no module {missing}\n"):
            check_user_code(RunConfig(model=ModelConfig(target=target)))
    with pytest.raises(RuntimeError, match="imported"):
        build_user_module(ModelConfig(target="explosive.inner.models.Model"), 0)


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ("class Model: ...", True),
        ("def Model(): ...", True),
        ("Model = Other", True),
        ("from torch.nn import Linear as Model", True),
        ("try:\n    import a\nexcept ImportError:\n    class Model: ...", True),
        ("if True:\n    Model: type = int", True),
        ("(Model, other) = 1, 2", True),
        ("from torch.nn import *", True),
        ("def __getattr__(name): ...", True),
        ("globals()['Mod' + 'el'] = int", True),
        ("import sys\nsys.modules[__name__] = object()", True),
        ("this is no Python", True),
        ("class Modle: ...", False),
        ("class Other:\n    class Model: ...", False),
        ("def other():\n    Model = 1", False),
        ("", False),
    ],
)
def test_only_misspelt_names_are_refused(
    source: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_models.py").write_text(f"{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    if known:
        check_user_code(RunConfig(model=ModelConfig(target="own_models.Model")))
    else:
        with pytest.raises(ConfigError, match="the module own_models has no Model\n"):
            check_user_code(RunConfig(model=ModelConfig(target="own_models.Model")))


def test_construction_reports_progress() -> None:
    """A constructor that draws many weights is not taken for a hang."""
    reports: list[str] = []
    plan = tiny_plan(None, model__target=f"{HERE}.Fine", model__arguments={"width": 4, "depth": 2})
    set_progress_listener(reports.append)
    try:
        parameters = len(dict(build_model(plan, "cpu").named_parameters()))
    finally:
        set_progress_listener(None)
    assert reports == ["building the model"] * parameters


def test_weights_depend_on_the_seed() -> None:
    model = {"model__target": f"{HERE}.Fine", "model__arguments": {"width": 4, "depth": 2}}
    plan = tiny_plan(None, **model)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    module = build_model(plan, "cpu")
    reader = InitialWeights(plan)
    assert {key.name for key in reader.tensors} == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        value = torch.empty(parameter.shape)
        reader.read([Shard(TensorKey(WEIGHT, name), tuple(value.shape), Box.whole(value.shape), value)])
        assert torch.equal(value, parameter), name
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(plan.config.train.seed)
    own = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    assert torch.equal(module.get_parameter("layers.1.weight"), own[1].weight)
    other = build_model(tiny_plan(None, **model, train__seed=9), "cpu")
    assert not torch.equal(module.get_parameter("layers.0.weight"), other.get_parameter("layers.0.weight"))
    assert all(parameter.is_meta for parameter in build_model(plan, "meta").parameters())
