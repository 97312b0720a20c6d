"""Snapshots in memory on several nodes, each a group of ranks with a folder of its own: what a node that was
lost had comes from its partner.

    pytest tests/train/test_partner_copies.py
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.damage import flip_byte
from tests.train.tiny_run import read_jsonl
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.shard import Box, Shard, StateReader, TensorKey
from toolkit.config.monitor import MonitorConfig, WandbMode
from toolkit.config.schema import EngineName, EvalConfig, RunConfig, RunSection
from toolkit.data.tokens.stdlib import ensure_stdlib
from toolkit.errors import ExitCode
from toolkit.estimate.plan_report import to_json
from toolkit.goodput import read_times
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.rundir.directory import RunDirectory
from toolkit.testing.dist import RankPool, rank_pool, run_ranks
from toolkit.testing.tiny import tiny_config
from toolkit.train import rank_exchange
from toolkit.train.rank_exchange import FilePart, open_exchange
from toolkit.train.snapshot_restore import Snapshot, SnapshotLost
from toolkit.train.snapshot_store import SnapshotStore

WORLD = World(ranks=2, ranks_per_node=1, device=Device.CPU, has_compiler=True)
STEPS, ON_DISK, IN_MEMORY, CRASH = 8, 3, 4, 5
SECONDS = 300.0  # for anything, on a busy machine


# ---- files


def part_of(rank: int, step: float) -> torch.Tensor:
    return torch.arange(10.0) + 100 * rank + step


def shards_of(rank: int, ranks: int, step: float) -> list[Shard]:
    """Ten elements a rank of one tensor, and a small tensor that every rank has."""
    key, shared = TensorKey("weight", "w"), TensorKey("weight", "shared")
    return [
        Shard(key, (10 * ranks,), Box((10 * rank,), (10,)), part_of(rank, step)),
        Shard(shared, (2,), Box((0,), (2,)), torch.full((2,), step), replica=rank, replicas=ranks),
    ]


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))


def write_twice(rank: int, ranks: int, root: Path, per_node: int) -> list[str]:
    """Write snapshots of the steps 2 and 4, and return the files on this rank's node."""
    rank_exchange.CHUNK_BYTES = 64  # several chunks a file
    exchange = open_exchange(rank, ranks, per_node)
    folder = root / f"node-{exchange.node}"
    folder.mkdir(exist_ok=True)
    (folder / ".tmp-left").mkdir(exist_ok=True)
    exchange.gather(None)
    store = SnapshotStore(folder, exchange)
    for step in (2, 4):
        path = store.save(
            step, shards_of(rank, ranks, step), {"step": step}, namespace="test/1", attempt=1
        ).wait()
        assert path == folder / f"step-{step:08d}"
    exchange.gather(None)
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-00000004"]
    return names(folder)


def fetch(rank: int, ranks: int, root: Path, lost: int) -> tuple[list[str], bool]:
    """Restore what this rank had on a ring of nodes; return the node's files before the load."""
    from toolkit.checkpoint import manifest

    exchange = open_exchange(rank, ranks, 1)
    folder = root / f"node-{rank}" / "step-00000004"
    files = [
        frozenset(path.name for path in (root / f"node-{node}").rglob("*.safetensors"))
        for node in range(ranks)
    ]
    assert not files[lost]
    loaded = exchange.broadcast(manifest.load(folder) if rank != lost else None, (lost + 1) % ranks)
    folder.mkdir(exist_ok=True)
    targets = shards_of(rank, ranks, 0)

    def load(reader: StateReader) -> None:
        assert reader.scalars["step"] == 4
        reader.read(targets)

    snapshot = Snapshot(folder, loaded, tuple(files), exchange)
    snapshot.fetch(load)
    assert torch.equal(targets[0].data, part_of(rank, 0)), "the first load changes nothing"
    load(snapshot.reader(make_plan(tiny_config("gpt2"), replace(WORLD, ranks=1))))
    equal = all(torch.equal(a.data, b.data) for a, b in zip(targets, shards_of(rank, ranks, 4), strict=True))
    return names(folder), equal


def fail_to_receive(rank: int, ranks: int, root: Path) -> str:
    """Rank 1 cannot write what it receives; rank 0 sends all of it, and both go on."""
    rank_exchange.CHUNK_BYTES = 64
    exchange = open_exchange(rank, ranks, 1)
    own, other = root / f"own-{rank}", root / "missing" / "other" if rank else root / "other"
    own.write_bytes(bytes(range(200)))
    try:
        exchange.transfer(FilePart(own, 200, 1 - rank), FilePart(other, 200, 1 - rank), lambda: 0.5)
    except OSError as error:
        return type(error).__name__
    return "" if other.read_bytes() == own.read_bytes() else "other bytes"


@pytest.fixture(scope="module")
def ring() -> Iterator[RankPool]:
    with rank_pool(4) as pool:
        yield pool


def test_each_node_has_the_files_of_its_ranks_and_of_the_node_before(ring: RankPool, tmp_path: Path) -> None:
    part = "step-00000004/part-{:05d}.safetensors".format
    of_nodes = ring.run(write_twice, tmp_path, 2, timeout=SECONDS)
    assert of_nodes == [[part(rank) for rank in range(4)]] * 4
    for node in range(2):
        whole = torch.empty(40)
        reader = open_reader(tmp_path / f"node-{node}" / "step-00000004")
        reader.read([Shard(TensorKey("weight", "w"), (40,), Box((0,), (40,)), whole)])
        assert torch.equal(whole, torch.cat([part_of(rank, 4) for rank in range(4)]))


def test_lost_node_receives_the_files_that_it_reads_and_no_others(ring: RankPool, tmp_path: Path) -> None:
    part = "step-00000004/part-{:05d}.safetensors".format
    of_nodes = ring.run(write_twice, tmp_path, 1, ranks=3, timeout=SECONDS)
    assert of_nodes == [sorted([part(node), part((node - 1) % 3)]) for node in range(3)]
    shutil.rmtree(tmp_path / "node-1")
    (tmp_path / "node-1").mkdir()
    restored = ring.run(fetch, tmp_path, 1, ranks=3, timeout=SECONDS)
    assert [equal for _, equal in restored] == [True] * 3
    shared = {name for found, _ in restored for name in found}
    assert "part-00001.safetensors" in restored[1][0]
    assert len(restored[1][0]) <= 2, f"its own file, and the one with the shared tensor; of {shared}"


def test_error_of_one_rank_blocks_no_other(ring: RankPool, tmp_path: Path) -> None:
    assert ring.run(fail_to_receive, tmp_path, ranks=2, timeout=SECONDS) == ["", "FileNotFoundError"]


# ---- runs


@dataclass(frozen=True)
class Nodes:
    """A run on two nodes: its directory, and the snapshot folder of each node."""

    root: Path

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    def snapshot_folder(self, node: int) -> Path:
        return self.root / f"node-{node}"

    def snapshot(self, node: int) -> Path:
        return self.snapshot_folder(node) / f"step-{IN_MEMORY:08d}"

    def lose(self, node: int) -> None:
        shutil.rmtree(self.snapshot_folder(node))
        self.snapshot_folder(node).mkdir()

    def losses(self) -> list[float]:
        rows = read_jsonl(self.run_dir / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        return [row["loss"] for row in rows]

    def resumed_from(self) -> int | None:
        times = read_times(RunDirectory(self.run_dir).attempt_folder(2))
        return None if times is None else times.first

    def log(self) -> str:
        return (self.root / "log").read_text()


def config_of(run_dir: Path, data: Path, engine: str) -> RunConfig:
    config = tiny_config(
        "gpt2",
        train__steps=STEPS,
        engine__name=EngineName(engine),
        checkpoint__every=str(ON_DISK),
        checkpoint__memory_every=IN_MEMORY,
    )
    config.monitor = MonitorConfig(wandb=WandbMode.disabled, system_seconds=0, probe=False, hang_seconds=0)
    config.run, config.eval = RunSection(dir=str(run_dir)), EvalConfig(every=0)
    config.data.path, config.data.vocab_size = str(data), 264
    config.debug.threads = 1
    return config


class Crash(Exception):
    """Ends all ranks after the same step."""


def train_on_node(
    rank: int, ranks: int, nodes: Nodes, data: Path, engine: str, attempt: int, crash: bool
) -> int | None:
    import logging

    from toolkit.train.run import run

    handler = logging.FileHandler(nodes.root / ("log" if rank == 0 else f"log-{rank}"))
    logging.getLogger("toolkit").addHandler(handler)
    logging.getLogger("toolkit").setLevel(logging.INFO)
    steps = 0

    def stop() -> None:
        nonlocal steps
        steps += 1
        if crash and steps == CRASH:
            deadline = time.monotonic() + SECONDS
            while not (nodes.snapshot(rank) / "manifest.json").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            raise Crash

    plan = make_plan(config_of(nodes.run_dir, data, engine), replace(WORLD, ranks=ranks))
    try:
        return int(
            run(
                plan,
                rank=rank,
                local_rank=0,
                stop=stop,
                attempt=attempt,
                snapshot_folder=nodes.snapshot_folder(rank),
            )
        )
    except Crash:
        return None


def train_nodes(
    nodes: Nodes, data: Path, engine: str = "deepspeed", *, crash: bool = False, ranks: int = 2
) -> None:
    config = config_of(nodes.run_dir, data, engine)
    directory = RunDirectory(nodes.run_dir)
    attempt = directory.begin(config, to_json(make_plan(config, replace(WORLD, ranks=ranks))))
    for node in range(2):
        nodes.snapshot_folder(node).mkdir(exist_ok=True)
    codes = run_ranks(train_on_node, ranks, nodes, data, engine, attempt, crash, timeout=SECONDS)
    assert codes == [None if crash else ExitCode.DONE] * ranks
    directory.release()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data") / "monitor"
    ensure_stdlib(data, 264, root=Path(__file__).resolve().parents[2] / "toolkit" / "monitor")
    return data


@dataclass(frozen=True)
class Case:
    """Losses of an unbroken run, and the state in which a crash left another one."""

    losses: list[float]
    crashed: Nodes

    def copy_to(self, folder: Path) -> Nodes:
        shutil.copytree(self.crashed.root, folder, dirs_exist_ok=True)
        return Nodes(folder)


def crash_a_run(engine: str, data: Path, folder: Path) -> Case:
    unbroken, crashed = Nodes(folder / "unbroken"), Nodes(folder / "crashed")
    for nodes in (unbroken, crashed):
        nodes.root.mkdir()
    train_nodes(unbroken, data, engine)
    losses = unbroken.losses()
    assert len(set(losses)) == STEPS, "otherwise a wrong resume could pass"
    train_nodes(crashed, data, engine, crash=True)
    return Case(losses, crashed)


@pytest.fixture(scope="module")
def case(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return crash_a_run("deepspeed", data, tmp_path_factory.mktemp("case"))


@pytest.mark.timeout(1200)
def test_run_continues_to_the_bit_from_the_partner_of_a_lost_node(
    case: Case, data: Path, tmp_path: Path
) -> None:
    nodes = case.copy_to(tmp_path)
    nodes.lose(1)
    train_nodes(nodes, data)
    assert nodes.losses() == case.losses
    assert nodes.resumed_from() == IN_MEMORY
    assert f"continues from {nodes.snapshot(0)}" in nodes.log()


@pytest.mark.timeout(1200)
def test_flipped_bit_in_the_partners_copy_means_the_disk(case: Case, data: Path, tmp_path: Path) -> None:
    """The control: what the test above finds at the partner has a damage."""
    nodes = case.copy_to(tmp_path)
    nodes.lose(1)
    flip_byte(nodes.snapshot(0) / "part-00001.safetensors")
    train_nodes(nodes, data)
    assert nodes.losses() == case.losses
    assert nodes.resumed_from() == ON_DISK
    assert f"the snapshot {nodes.snapshot(0)} is damaged and not used" in nodes.log()


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_lost_first_node_with_megatron(data: Path, tmp_path: Path) -> None:
    case = crash_a_run("megatron", data, tmp_path)
    nodes = case.copy_to(tmp_path / "copy")
    nodes.lose(0)
    train_nodes(nodes, data, "megatron")
    assert nodes.losses() == case.losses
    assert nodes.resumed_from() == IN_MEMORY


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_flipped_bit_on_a_living_node_is_replaced_by_the_partners_copy(
    case: Case, data: Path, tmp_path: Path
) -> None:
    nodes = case.copy_to(tmp_path)
    flip_byte(nodes.snapshot(1) / "part-00001.safetensors")
    train_nodes(nodes, data)
    assert nodes.losses() == case.losses
    assert nodes.resumed_from() == IN_MEMORY


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_one_node_continues_with_what_it_has_of_both(case: Case, data: Path, tmp_path: Path) -> None:
    nodes = case.copy_to(tmp_path)
    train_nodes(nodes, data, ranks=1)
    assert nodes.losses() == pytest.approx(case.losses, abs=1e-5)
    assert nodes.resumed_from() == IN_MEMORY


@pytest.mark.full
def test_snapshot_that_cannot_be_sent_is_removed_so_that_the_disk_is_used(
    ring: RankPool, tmp_path: Path
) -> None:
    ring.run(write_twice, tmp_path, 1, ranks=2, timeout=SECONDS)
    answers = ring.run(fetch_a_missing_file, tmp_path, ranks=2, timeout=SECONDS)
    assert answers == ["SnapshotLost"] * 2
    assert not list(tmp_path.glob("node-*/step-*"))


def fetch_a_missing_file(rank: int, ranks: int, root: Path) -> str:
    from toolkit.checkpoint import manifest

    exchange = open_exchange(rank, ranks, 1)
    folder = root / f"node-{rank}" / "step-00000004"
    loaded = manifest.load(folder)
    files = (frozenset(record.file for record in loaded.files), frozenset[str]())
    exchange.gather(None)
    if rank == 0:
        (folder / "part-00001.safetensors").unlink()
    targets = shards_of(rank, ranks, 0)
    try:
        Snapshot(folder, loaded, files, exchange).fetch(lambda reader: reader.read(targets))
    except SnapshotLost as error:
        return type(error).__name__
    return "sent"
