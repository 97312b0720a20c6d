"""Compare replicas by their hashes and find the differing tensor and rank.

Each rank has a 64-bit hash per tensor. For a set of tensors it sends 17 sums: of all hashes, and for each
binary digit of a tensor's index the sum over the tensors with that digit set. If one tensor differs, the sums
that differ spell its index, so one small gather identifies it.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.monitor.alert import Alert, Level

DIGITS = 16  # binary digits of a tensor's index: 65,536 tensors in a set
WHAT, LEADER, COUNT, SUMS = 0, 1, 2, 3  # indices in a row of 64-bit integers
WIDTH = SUMS + 1 + DIGITS
NO_LEADER = -1  # at LEADER: an empty row


@dataclass(frozen=True, slots=True)
class TensorSet:
    """Tensors that are replicated on the same ranks, as sent by ``leader``, the lowest of these ranks."""

    what: str
    leader: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """Replicas of one set that are not equal.

    Attributes:
        odd: ranks that differ from the majority; all of them if there is none.
        number: index of the differing tensor; None if several differ.
    """

    what: int
    leader: int
    ranks: tuple[int, ...]
    odd: tuple[int, ...]
    majority: bool
    number: int | None


def name_code(what: str) -> int:
    """Return the integer that represents ``what``."""
    return zlib.crc32(what.encode())


def hash_row(tensor_set: TensorSet, hashes: np.ndarray) -> np.ndarray:
    """Compute what one rank sends of one set: int64 [WIDTH].

    Args:
        hashes: int64 [tensors].
    """
    assert len(hashes) == len(tensor_set.names) < 2**DIGITS, (
        f"{len(hashes)} hashes of {len(tensor_set.names)} tensors"
    )
    numbers = np.arange(len(hashes))
    row = np.empty(WIDTH, dtype=np.int64)
    row[WHAT], row[LEADER], row[COUNT] = name_code(tensor_set.what), tensor_set.leader, len(hashes)
    row[SUMS] = hashes.sum()  # modulo 2^64, as numpy's integers
    for digit in range(DIGITS):
        row[SUMS + 1 + digit] = hashes[(numbers >> digit) & 1 == 1].sum()
    return row


def hash_block(rows: Sequence[np.ndarray], slots: int) -> np.ndarray:
    """Stack rows to [slots, WIDTH], with empty rows if this rank has fewer sets than others."""
    block = np.zeros((slots, WIDTH), dtype=np.int64)
    block[:, LEADER] = NO_LEADER
    for at, row in enumerate(rows):
        block[at] = row
    return block


def find_differences(blocks: np.ndarray) -> list[ReplicaDifference]:
    """Find the sets that differ in one comparison.

    Args:
        blocks: int64 [ranks, slots, WIDTH].
    """
    ranks, slots = np.nonzero(blocks[:, :, LEADER] != NO_LEADER)
    rows = blocks[ranks, slots]
    differences = []
    for what, leader in np.unique(rows[:, [WHAT, LEADER]], axis=0).tolist():
        mine = (rows[:, WHAT] == what) & (rows[:, LEADER] == leader)
        members, sums = ranks[mine], rows[mine][:, COUNT:]
        if (sums == sums[0]).all():
            continue
        common, votes = Counter(row.tobytes() for row in sums).most_common(1)[0]
        majority = 2 * votes > len(members)
        usual = np.frombuffer(common, dtype=np.int64)
        odd = (sums != usual).any(1)
        number = _number(usual, sums[odd])
        differences.append(
            ReplicaDifference(
                what,
                leader,
                tuple(members.tolist()),
                tuple((members[odd] if majority else members).tolist()),
                majority,
                number,
            )
        )
    return differences


def _number(usual: np.ndarray, odd: np.ndarray) -> int | None:
    """Return the index of the one tensor whose hash explains all differences; None if there is none."""
    numbers = set()
    for sums in odd - usual:  # modulo 2^64
        count, whole, digits = sums[0], sums[1], sums[2:]
        if count or not whole or not ((digits == 0) | (digits == whole)).all():
            return None
        numbers.add(sum(1 << digit for digit in range(DIGITS) if digits[digit]))
    return numbers.pop() if len(numbers) == 1 else None


class ReplicaDetector:
    """Builds the alerts on rank 0.

    Args:
        ranks_per_node: identifies the machine to check.
    """

    def __init__(self, ranks_per_node: int) -> None:
        self._sets: dict[tuple[int, int], TensorSet] = {}
        self._ranks_per_node = ranks_per_node
        self._equal_at: dict[tuple[int, int], int] = {}

    def add_sets(self, sets: Sequence[TensorSet]) -> None:
        """Set the tensor names of sets; they replace earlier ones."""
        self._sets |= {(name_code(tensor_set.what), tensor_set.leader): tensor_set for tensor_set in sets}

    def check(self, step: int, blocks: np.ndarray) -> list[Alert]:
        """Return alerts for the comparison after ``step``."""
        differences = find_differences(blocks)
        alerts = [self._alert(step, difference) for difference in differences]
        differing = {(difference.what, difference.leader) for difference in differences}
        self._equal_at |= {key: step for key in self._sets if key not in differing}
        return alerts

    def _alert(self, step: int, difference: ReplicaDifference) -> Alert:
        key = (difference.what, difference.leader)
        known = self._sets[key]
        equal = self._equal_at.get(key)
        since = f"equal after step {equal}" if equal is not None else "not seen equal in this attempt"
        name = "several tensors" if difference.number is None else known.names[difference.number]
        rest = len(difference.ranks) - len(difference.odd)
        who = _ranks(difference.odd)
        if difference.majority:
            others = f"the other {rest} rank{'s' if rest > 1 else ''}"
            cause = f"{known.what} of {who} differ from those of {others} that should be equal: {name}"
        else:
            cause = (
                f"{known.what} of {who} should be equal but differ, with no majority that shows which "
                f"is right: {name}"
            )
        locations = ", ".join(
            f"node {rank // self._ranks_per_node} GPU {rank % self._ranks_per_node}"
            for rank in difference.odd[:4]
        )
        before = f"before step {equal + 1}" if equal is not None else "from before this attempt"
        return Alert(
            name="replicas-differ",
            fault="state",
            where=who,
            level=Level.ERROR,
            step=step,
            cause=cause,
            evidence=f"64-bit hashes of {len(known.names)} tensors on {_ranks(difference.ranks)} after step "
            f"{step}; {since}",
            next_step="stop, and start the same command with resume=RUN_DIR/checkpoints/step-N of a "
            f"checkpoint {before}; test the hardware ({locations}): dcgmi diag -r 3, and memtest for "
            "the host; exclude it if this recurs. Several tensors on many ranks at once "
            "indicate nondeterministic kernels (check with debug.deterministic=true)",
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{rest}"


def pack_names(sets: Sequence[TensorSet], rank: int) -> bytes:
    """Pack the names of the sets that ``rank`` leads; empty if there are none."""
    led = [[tensor_set.what, list(tensor_set.names)] for tensor_set in sets if tensor_set.leader == rank]
    return zlib.compress(json.dumps(led).encode()) if led else b""


def unpack_names(packed: bytes, rank: int) -> list[TensorSet]:
    if not packed.rstrip(b"\0"):
        return []
    text = zlib.decompressobj().decompress(packed)  # padding may follow the end
    return [TensorSet(what, rank, tuple(names)) for what, names in json.loads(text)]
