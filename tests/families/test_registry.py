"""Families of packages of the user's own: entry points, dotted paths, and the error of each mistake.

pytest tests/families/test_registry.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.families.plugin import MISTRAL
from tests.plan.cases import CPU, SMALL, run_config
from toolkit import families
from toolkit.config.schema import EngineName
from toolkit.errors import ConfigError, PlanError
from toolkit.families.llama import LLAMA
from toolkit.families.registry import FamilyRegistry
from toolkit.plan import make_plan
from toolkit.user_code import check_user_code

HERE = "tests.families.plugin"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> FamilyRegistry:
    """A new registry in place of the process's own."""
    registry = FamilyRegistry(families.BUILT_IN)
    monkeypatch.setattr(families, "FAMILIES", registry)
    return registry


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, **entries: str) -> None:
    """Create a package ``their_models`` that registers ``entries``."""
    (folder / "their_models.py").write_text(code)
    metadata = folder / "their_models-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-models\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[toolkit.families]", *lines]) + "\n")
    monkeypatch.syspath_prepend(folder)


def test_an_installed_package_registers_a_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: FamilyRegistry
) -> None:
    install(tmp_path, monkeypatch, f"from {HERE} import MISTRAL\n", mistral="their_models:MISTRAL")
    assert list(registry) == ["gpt2", "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "mistral"]
    assert registry["mistral"] is MISTRAL
    for engine, ranks in ((EngineName.local, 1), (EngineName.deepspeed, 2), (EngineName.megatron, 2)):
        config = run_config(model=replace(SMALL, family="mistral"), engine__name=engine)
        plan = make_plan(config, replace(CPU, ranks=ranks, ranks_per_node=ranks))
        assert plan.shape is not None
        assert plan.shape.family == "mistral"
        assert plan.memory is not None


def test_a_dotted_path_names_a_family_without_a_package(registry: FamilyRegistry) -> None:
    config = run_config(model=replace(SMALL, family=f"{HERE}.MISTRAL"))
    check_user_code(config)
    plan = make_plan(config, CPU)
    assert plan.shape is not None
    assert plan.shape.family == "mistral"
    assert registry["mistral"] is MISTRAL
    assert plan.parameters == LLAMA.parameters(plan.shape)


@pytest.mark.parametrize(
    ("code", "entry", "shows"),
    [
        ("1 / 0", "their_models:M", "their-models: it raises ZeroDivisionError"),
        ("M = 3", "their_models:M", "int has no name, namespace, traits"),
        (f"from {HERE} import Mistral as M", "their_models:M", "Mistral is a class"),
        (f"from {HERE} import UNFINISHED as M", "their_models:M", "Unfinished has no namespace"),
        ("from toolkit.families.llama import Llama\nM = Llama()", "their_models:M", "another family llama"),
    ],
)
def test_a_broken_package_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    registry: FamilyRegistry,
    code: str,
    entry: str,
    shows: str,
) -> None:
    monkeypatch.delitem(__import__("sys").modules, "their_models", raising=False)
    install(tmp_path, monkeypatch, code, theirs=entry)
    assert registry["llama"] is LLAMA, "other families work"
    with pytest.raises(PlanError, match=shows):
        make_plan(run_config(model=replace(SMALL, family="theirs")), CPU)


def test_mistakes_in_a_dotted_path_are_reported(registry: FamilyRegistry) -> None:
    config = run_config(model=replace(SMALL, family=f"{HERE}.MISTRLA"))
    with pytest.raises(ConfigError, match=f"write model.family={HERE}.MISTRAL"):
        check_user_code(config)
    with pytest.raises(PlanError, match="has no MISTRLA"):
        make_plan(config, CPU)
    with pytest.raises(PlanError, match="install the package that registers absent"):
        make_plan(run_config(model=replace(SMALL, family="absent")), CPU)
