"""The corpus: configurations modelled on public examples, and the runs that they describe together.

python -m tests.adopt.cases        writes the golden experiments again
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from toolkit.adopt.check import resolve_adoption
from toolkit.adopt.decide import Adoption, adopt
from toolkit.adopt.experiment import write_experiment
from toolkit.adopt.read import read_source
from toolkit.adopt.types import Source
from toolkit.plan.types import RunPlan

HERE = Path(__file__).parent
CORPUS, GOLDEN = HERE / "corpus", HERE / "golden"
TOGETHER = {
    "trainer_and_deepspeed": ("trainer_with_deepspeed.json", "ds_zero3_offload_auto.json"),
    "accelerate_and_deepspeed": ("accelerate_ds_file.yaml", "ds_zero2_offload_auto.json"),
}
RUNS: dict[str, tuple[str, ...]] = {
    **{path.stem: (path.name,) for path in sorted(CORPUS.iterdir())},
    **TOGETHER,
}


@cache
def sources(name: str) -> tuple[Source, ...]:
    return tuple(read_source(CORPUS / file) for file in RUNS[name])


@cache
def adopted(name: str) -> tuple[Adoption, RunPlan]:
    return resolve_adoption(adopt(sources(name)), RUNS[name])


def experiment(name: str) -> str:
    return write_experiment(adopted(name)[0], name, RUNS[name])


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in RUNS:
        (GOLDEN / f"{name}.yaml").write_text(experiment(name), encoding="utf-8")
