"""An end-to-end story of a training on CPU, as commands that a user types: `make story`, or

    python -m tests.story                    in a new folder, runs/story-...
    python -m tests.story FOLDER

Text in an S3 bucket (served on loopback) -> prepare -> a sweep of two points -> the better one as a job of
two nodes -> one rank killed -> resumed with another engine and layout -> W&B offline, report, Hugging Face
export. The losses must equal those of an undisturbed run. Exit code: 0 all checks pass, 1 a check fails.
"""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.data.local_stores import SECRETS, Store, environment, served
from tests.launch.processes import ROOT, TRAIN, command
from tests.monitor.wandb_file import history, run_record
from tests.story.losses import TOLERANCE, apart, losses
from tests.story.machines import ENDED_SECONDS, Command, Machines, two_machines
from tests.story.steps import Story, StoryFailed
from tests.waiting import wait_until
from toolkit.data.manifest import read_manifest
from toolkit.progress import quantity
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

STEPS, SWEPT, SAVES, KILL_AFTER = (
    60,
    20,
    20,
    25,
)  # of the run, of a point, between two checkpoints; step at which a rank is killed
WINDOWS, LENGTH = 64, 128  # of an evaluation: eval.batches x train.global_batch, train.sequence_length
RUN = (f"--config-dir={ROOT / 'tests/story/conf'}", "+exp=story")
RATES = ("1e-4", "3e-3")
FILES, LONGEST = 150, 60_000  # of Python's own source code, which is the text; longer files are left out


def main(arguments: Sequence[str]) -> int:
    if not {"--help", "-h"}.isdisjoint(arguments):
        print((__doc__ or "").strip())
        return 0
    folder = Path(arguments[0] if arguments else f"runs/story-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    folder.mkdir(parents=True)
    (folder / "bucket").mkdir()
    with served(folder / "bucket") as store:
        # Use the CPU, and keep library caches in the story's own folder.
        story = Story(
            folder,
            {
                **environment(store),
                "XDG_CACHE_HOME": str(folder / "cache"),
                "CUDA_VISIBLE_DEVICES": "",
                "DS_ACCELERATOR": "cpu",
                "PYTHONPATH": str(ROOT),
            },
        )
        try:
            run_story(story, store)
            code = 0
        except (
            StoryFailed,
            AssertionError,
            OSError,
        ) as error:  # failed commands raise AssertionError with their output
            story.print(f"\nFAILED: {error}")
            code = 1
    story.print(f"\n{story.table()}")
    story.print(
        f"\neverything is in {folder}: sweep/sweep.png, what each command printed in log/, the run's "
        "report.html in machines/"
    )
    return code


def run_story(story: Story, store: Store) -> None:
    with story.step("prepare the text of a bucket"):
        data = prepare(story, store)
    with story.step("sweep two points with the local engine"):
        better, worse, rate = sweep(story)
    with two_machines(story, store) as machines:
        run = RunDirectory(machines.shared / "run")
        with story.step("train the better one on two nodes with DeepSpeed; kill rank 1"):
            saved = two_nodes(story, machines, run, rate)
    with story.step("resume the run with Megatron-core, TP 2"):
        go_on(story, run, rate, saved)
    with story.step("train the uninterrupted reference: one node, DeepSpeed"):
        unbroken = whole(story, rate)
    with story.step("compare losses with the uninterrupted run"):
        compare(story, run, saved, unbroken, better, worse)
    with story.step("W&B offline, and the report"):
        look(story, run)
    with story.step("load the Hugging Face export with transformers only"):
        export(story, run, data)


def prepare(story: Story, store: Store) -> Path:
    texts = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if file.stat().st_size <= LONGEST and len(texts) < FILES:
            texts.append({"name": file.name, "text": file.read_text(encoding="utf-8", errors="replace")})
    lines = [json.dumps(text).encode() + b"\n" for text in texts]
    bucket = store.root / "text"
    bucket.mkdir()
    (bucket / "first.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))
    (bucket / "second.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[len(lines) // 2 :])))
    sizes = sum(file.stat().st_size for file in bucket.iterdir())
    data = story.folder / "data"
    story.run(
        "data",
        [
            sys.executable,
            str(ROOT / "launch/prepare.py"),
            "input=s3://corpus/text",
            f"output={data}",
            "validation=0.1",
            "tokenizer.vocab_size=1024",
            "licence=PSF-2.0",
            "workers=2",
        ],
    )
    report = json.loads((data / "report.json").read_text())
    tokens = read_manifest(data).split("train").tokens
    story.check(
        report["read"] == len(texts) and store.served_bytes >= sizes,
        f"{report['read']} documents and {quantity(store.served_bytes, 'B')} of s3://corpus/text: "
        f"{tokens:,} tokens to train on",
    )
    story.print(
        "   $ cp -r data bucket/prepared     (with a real store: aws s3 cp --recursive data s3://corpus/prepared)"
    )
    shutil.copytree(data, store.root / "prepared")
    return data


def sweep(story: Story) -> tuple[dict[int, float], dict[int, float], str]:
    """Return the losses of the better and of the worse point, and the better learning rate as typed."""
    folder = story.folder / "sweep"
    story.run(
        "sweep",
        [
            sys.executable,
            str(TRAIN),
            "-m",
            *RUN,
            "engine=local",
            f"train.steps={SWEPT}",
            f"optim.lr={','.join(RATES)}",
            f"sweep.dir={folder}",
        ],
    )
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    story.check(
        [row["state"] for row in rows] == ["done", "done"] and (folder / "sweep.png").is_file(),
        "2 points are done",
    )
    groups = [run_record(file).run_group for file in folder.rglob("*.wandb")]
    story.check(groups == [folder.name] * 2, f"W&B has them in one group, {folder.name}")
    best, other = rows
    numbers = [float(row["loss"]) for row in rows]
    story.check(
        numbers[0] < numbers[1],
        f"best first: optim.lr={best['optim.lr']} {numbers[0]:.4f}, {other['optim.lr']} {numbers[1]:.4f}",
    )
    found = [losses(RunDirectory(row["run_dir"]).metrics_file) for row in rows]
    return found[0], found[1], next(rate for rate in RATES if float(rate) == float(best["optim.lr"]))


def two_nodes(story: Story, machines: Machines, run: RunDirectory, rate: str) -> int:
    """Return the step of the remaining checkpoint."""
    commands = [
        machines.start(number, TRAIN, *RUN, f"optim.lr={rate}", f"run.dir={run.path}") for number in range(2)
    ]
    story.saw(f"on {machines.what} with one shared folder; the text from s3://corpus/prepared")

    def trained() -> int:
        return run.metrics_file.read_bytes().count(b"\n") if run.metrics_file.exists() else 0

    wait_for(lambda: trained() > 0, 120, "training", commands)
    rank = machines.rank(commands, 1)
    if rank is None:
        raise StoryFailed("rank 1 was not found on its node")
    wait_for(lambda: trained() >= KILL_AFTER, 120, f"at step {KILL_AFTER}", commands)
    story.print(f"   node1$ kill -9 {rank.pid}")
    rank.send_signal(signal.SIGKILL)
    seconds = wait_for(
        lambda: all(one.code() is not None for one in commands), ENDED_SECONDS, "ended", commands, alive=False
    )
    codes = [one.code() for one in commands]
    status = run.status()
    if status is None:
        raise StoryFailed(f"the run left no status\n{outputs(commands)}")
    story.check(
        0 not in codes and status.state is RunState.FAILED and trained() < STEPS,
        f"rank 1 killed after step {trained()}: both nodes ended in {seconds:.1f} s, the run is "
        f"{status.state}",
    )
    saved = trained() // SAVES * SAVES
    story.check(run.saved_step() == saved, f"the newest checkpoint is of step {saved}")
    return saved


def go_on(story: Story, run: RunDirectory, rate: str, saved: int) -> None:
    output = story.run(
        "go_on",
        command(
            "torchrun",
            TRAIN,
            *RUN,
            f"optim.lr={rate}",
            f"run.dir={run.path}",
            "engine=megatron",
            "parallel.tensor=2",
            "zero=stage0",
            "checkpoint.export=true",
        ),
    )
    status = run.status()
    story.check(
        status is not None and (status.state, status.attempt, status.step) == (RunState.DONE, 2, STEPS),
        f"attempt 2, TP 2 through torchrun, from step {saved}: step {STEPS}, done",
    )
    goodput = next((line for line in output.splitlines() if line.startswith("goodput")), "")
    story.check(f"{saved} steps and " in output and "2 attempts" in goodput, goodput)


def whole(story: Story, rate: str) -> RunDirectory:
    run = RunDirectory(story.folder / "unbroken")
    story.run(
        "unbroken",
        command("deepspeed", TRAIN, *RUN, f"optim.lr={rate}", f"run.dir={run.path}", "monitor=files"),
    )
    status = run.status()
    story.check(
        status is not None and (status.state, status.attempt, status.step) == (RunState.DONE, 1, STEPS),
        f"{STEPS} steps, one attempt",
    )
    return run


def compare(
    story: Story,
    run: RunDirectory,
    saved: int,
    unbroken: RunDirectory,
    better: dict[int, float],
    worse: dict[int, float],
) -> None:
    found, expected = losses(run.metrics_file), losses(unbroken.metrics_file)
    story.check(
        sorted(found) == sorted(expected) == list(range(1, STEPS + 1)),
        f"each of {STEPS} steps once; loss {expected[1]:.3f} to {expected[STEPS]:.3f}",
    )
    before, after, points = range(1, saved + 1), range(saved + 1, STEPS + 1), range(1, SWEPT + 1)
    story.check(apart(found, expected, before) == 0, f"steps 1 to {saved}, two nodes: bitwise equal")
    again = losses(run.attempt_folder(1) / "metrics.jsonl")
    story.check(
        apart(again, expected, again) == 0,
        f"steps {min(again)} to {max(again)}, lost and repeated: bitwise equal",
    )
    by = apart(found, expected, after)
    story.check(
        by <= TOLERANCE,
        f"steps {saved + 1} to {STEPS}, Megatron-core: largest difference {by:.1e} (allowed {TOLERANCE:.0e})",
    )
    by = apart(better, expected, points)
    story.check(by <= TOLERANCE, f"the sweep's point, local engine: {by:.1e}")
    # The controls: differing runs must be detected.
    other, late = (
        apart(worse, expected, points),
        apart({step + 1: loss for step, loss in found.items()}, expected, after),
    )
    changed = apart(found | {STEPS: found[STEPS] + 2 * TOLERANCE}, expected, after)
    story.check(
        min(other, late, changed) > TOLERANCE,
        f"control: difference with the other learning rate {other:.1e}, one step late {late:.1e}, one "
        f"number changed {changed:.1e}",
    )


def look(story: Story, run: RunDirectory) -> None:
    files = sorted((run.path / "wandb").rglob("*.wandb"), key=lambda file: file.stat().st_mtime)
    rows = [row for file in files for row in history(file) if "train/loss" in row]
    logged = {row["step"]: row["train/loss"] for row in rows}  # later ones are recorded
    story.check(
        logged == losses(run.metrics_file),
        f"W&B offline: {len(files)} parts of one run, {len(rows)} rows, of them the {STEPS} that stand",
    )
    story.run("report", [sys.executable, str(ROOT / "launch/report.py"), str(run.path)])
    page = (run.path / "report.html").read_text(encoding="utf-8")
    twice = len(losses(run.attempt_folder(1) / "metrics.jsonl"))
    words = f"It took 2 attempts, in which {twice} steps were repeated."
    story.check(words in page, f'report.html, {quantity(len(page), "B")}: "{words}"')
    files = [
        file
        for folder in (run.path, story.folder / "sweep", story.folder / "data")
        for file in folder.rglob("*")
        if file.is_file()
    ]
    secrets = [secret.encode() for secret in SECRETS.values()]
    leaked = [file for file in files if any(secret in file.read_bytes() for secret in secrets)]
    story.check(not leaked, f"the store's keys appear in none of {len(files)} files")


def export(story: Story, run: RunDirectory, data: Path) -> None:
    output = story.run(
        "export",
        [
            sys.executable,
            str(ROOT / "tests/story/export.py"),
            str(run.export),
            str(data / "validation-00000.bin"),
            str(WINDOWS),
            str(LENGTH),
        ],
    )
    opened = json.loads(output.strip().splitlines()[-1])
    own = [json.loads(line) for line in run.eval_file.read_text().splitlines()][-1]
    by = abs(opened["loss"] - own["loss"])
    story.check(
        own["step"] == STEPS and own["tokens"] == WINDOWS * LENGTH and by <= TOLERANCE,
        f"{opened['parameters']:,} parameters; validation loss {opened['loss']:.6f}, in training "
        f"{own['loss']:.6f}: difference {by:.1e}",
    )
    story.print(f"   it continues: {opened['text']!r}")


def wait_for(
    holds: Callable[[], bool], seconds: float, what: str, commands: list[Command], *, alive: bool = True
) -> float:
    """Wait until it holds and return the seconds; fail with the output of ``commands``."""
    return wait_until(
        holds,
        seconds,
        what,
        ended=lambda: alive and any(one.code() is not None for one in commands),
        output=lambda: outputs(commands),
    )


def outputs(commands: list[Command]) -> str:
    return "\n".join(
        f"---- node {number}, code {one.code()}\n{one.output}" for number, one in enumerate(commands)
    )


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that no process is left behind
    sys.exit(main(sys.argv[1:]))
