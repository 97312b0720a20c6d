"""Arguments of a shell script are read without executing it.

pytest tests/adopt/test_shell.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.adopt.shell import parse_options, read_command, unresolved


def options(script: str) -> dict[str, object]:
    return parse_options(read_command(script).arguments)[0]


def test_arrays_variables_and_arithmetic() -> None:
    script = """
    N=4; M=$((N * 2))   # a comment
    ARGS=(
        --num-layers $N   # of "$M" things
        --lr 1e-4
    )
    ARGS+=(--bf16 --betas 0.9 0.95)
    torchrun --nproc_per_node ${GPUS:-8} train.py \\
        ${ARGS[@]} --seq-length=$M "--a b"
    """
    assert options(script) == {
        "num_layers": 4, "lr": 1e-4, "bf16": True, "betas": [0.9, 0.95], "seq_length": 8, "a": "b",
    }  # fmt: skip
    assert parse_options(read_command(script).launcher)[0] == {"nproc_per_node": 8}


def test_words_inside_an_if_carry_its_condition() -> None:
    script = """
    if [ -n "$KEY" ]; then
        MORE=(--wandb-project x)
    else
        OTHER=(--quiet)
    fi
    ALWAYS=(--seed 1)
    python train.py "${ALWAYS[@]}" "${MORE[@]}" "${OTHER[@]}"
    """
    words, conditions = parse_options(read_command(script).arguments)
    assert words == {"seed": 1, "wandb_project": "x", "quiet": True}
    assert set(conditions) == {"wandb_project", "quiet"}
    assert conditions["quiet"].startswith("not (")


def test_values_that_only_the_environment_has_are_named() -> None:
    found = options('python train.py --data-path $1 --save "$OUT/x" --name ${NAME:-run}')
    assert unresolved(found["data_path"]) == "$1"
    assert unresolved(found["save"]) == "$OUT/x"
    assert found["name"] == "run"


@pytest.mark.parametrize(
    "script",
    [
        "python train.py --name $(touch FILE)",
        "python train.py --name `touch FILE`",
        "X=$((__import__('os').system('touch FILE')))\npython train.py --name $X",
    ],
)
def test_nothing_is_executed(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options(script)
    assert not list(tmp_path.iterdir())


def test_arrays_that_grow_without_end_are_refused() -> None:
    doubling = "A=(--x 1)\n" + "A+=(${A[@]} ${A[@]})\n" * 40 + "python train.py ${A[@]}"
    with pytest.raises(ValueError, match="words"):
        options(doubling)
