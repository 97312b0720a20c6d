"""Whether copies are equal, by their hashes: which tensor differs, on which rank. Hashes in, alerts out.

A rank has one hash of each tensor, 64 bits. Of a set of tensors it sends 17 sums: of all hashes, and for each binary digit of a tensor's
number the sum over the tensors that have this digit. Where one tensor differs, the sums that differ spell its number; so one small gather
tells it, and names stay where they are known.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.monitor.alert import Alert, Level

DIGITS = 16  # of a tensor's number: 65,536 tensors in a set
WHAT, LEADER, COUNT, SUMS = 0, 1, 2, 3  # places in a row of 64-bit integers
WIDTH = SUMS + 1 + DIGITS
NO_LEADER = -1  # in LEADER's place: an empty row


@dataclass(frozen=True, slots=True)
class TensorSet:
    """Tensors that the same ranks hold, to the one that sends them: ``leader`` is the lowest of these ranks."""

    what: str
    leader: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """Copies of one set that are not equal.

    Attributes:
        odd: ranks that differ from most; all of them where there is no majority.
        number: of the tensor; None: several tensors differ.
    """

    what: int
    leader: int
    ranks: tuple[int, ...]
    odd: tuple[int, ...]
    majority: bool
    number: int | None


def name_code(what: str) -> int:
    """How ``what`` travels among integers."""
    return zlib.crc32(what.encode())


def hash_row(found: TensorSet, hashes: np.ndarray) -> np.ndarray:
    """What one rank sends of one set: int64 [WIDTH].

    Args:
        hashes: int64 [tensors].
    """
    assert len(hashes) == len(found.names) < 2**DIGITS, f"{len(hashes)} hashes of {len(found.names)} tensors"
    numbers = np.arange(len(hashes))
    row = np.empty(WIDTH, dtype=np.int64)
    row[WHAT], row[LEADER], row[COUNT] = name_code(found.what), found.leader, len(hashes)
    row[SUMS] = hashes.sum()  # modulo 2^64, as numpy's integers are
    for digit in range(DIGITS):
        row[SUMS + 1 + digit] = hashes[(numbers >> digit) & 1 == 1].sum()
    return row


def hash_block(rows: Sequence[np.ndarray], slots: int) -> np.ndarray:
    """[slots, WIDTH], with empty rows where this rank has fewer sets than others."""
    found = np.zeros((slots, WIDTH), dtype=np.int64)
    found[:, LEADER] = NO_LEADER
    for at, row in enumerate(rows):
        found[at] = row
    return found


def find_differences(blocks: np.ndarray) -> list[ReplicaDifference]:
    """Of one comparison.

    Args:
        blocks: int64 [ranks, slots, WIDTH].
    """
    ranks, slots = np.nonzero(blocks[:, :, LEADER] != NO_LEADER)
    rows = blocks[ranks, slots]
    found = []
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
        found.append(
            ReplicaDifference(
                what,
                leader,
                tuple(members.tolist()),
                tuple((members[odd] if majority else members).tolist()),
                majority,
                number,
            )
        )
    return found


def _number(usual: np.ndarray, odd: np.ndarray) -> int | None:
    """The one tensor's whose hash accounts for all differences."""
    found = set()
    for sums in odd - usual:  # modulo 2^64
        count, whole, digits = sums[0], sums[1], sums[2:]
        if count or not whole or not ((digits == 0) | (digits == whole)).all():
            return None
        found.add(sum(1 << digit for digit in range(DIGITS) if digits[digit]))
    return found.pop() if len(found) == 1 else None


class ReplicaDetector:
    """Names what differs. On rank 0.

    Args:
        ranks_per_node: for which machine to look at.
    """

    def __init__(self, ranks_per_node: int) -> None:
        self._sets: dict[tuple[int, int], TensorSet] = {}
        self._ranks_per_node = ranks_per_node
        self._equal_at: dict[tuple[int, int], int] = {}

    def learn(self, sets: Sequence[TensorSet]) -> None:
        """What tensors are in sets that come; they replace earlier words on them."""
        self._sets |= {(name_code(found.what), found.leader): found for found in sets}

    def see(self, step: int, blocks: np.ndarray) -> list[Alert]:
        """Of the comparison after ``step``."""
        found = find_differences(blocks)
        alerts = [self._alert(step, difference) for difference in found]
        differing = {(difference.what, difference.leader) for difference in found}
        self._equal_at |= {key: step for key in self._sets if key not in differing}
        return alerts

    def _alert(self, step: int, found: ReplicaDifference) -> Alert:
        key = (found.what, found.leader)
        known = self._sets[key]
        equal = self._equal_at.get(key)
        since = f"equal after step {equal}" if equal is not None else "never seen equal"
        name = "several tensors" if found.number is None else known.names[found.number]
        rest = len(found.ranks) - len(found.odd)
        who = _ranks(found.odd)
        if found.majority:
            others = f"the other {rest} rank{'s' if rest > 1 else ''}"
            cause = f"{known.what} of {who} differ from those of {others} that should be equal: {name}"
        else:
            cause = f"{known.what} of {who} should be equal and are not, and no majority tells which is right: {name}"
        place = ", ".join(
            f"node {rank // self._ranks_per_node} GPU {rank % self._ranks_per_node}" for rank in found.odd[:4]
        )
        before = f"before step {equal + 1}" if equal is not None else "from before it"
        return Alert(
            name="replicas-differ",
            where=who,
            level=Level.ERROR,
            step=step,
            cause=cause,
            evidence=f"64-bit hashes of {len(known.names)} tensors on {_ranks(found.ranks)} after step {step}; {since}",
            next_step=f"stop, and start the same command with resume=RUN_DIR/checkpoints/step-N of a checkpoint {before}; test the "
            f"hardware ({place}): dcgmi diag -r 3, and memtest for the host; leave it out if it comes again. Several tensors on "
            "many ranks at once: kernels that do not give the same result twice (debug.deterministic=true tells)",
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"


def pack_names(sets: Sequence[TensorSet], rank: int) -> bytes:
    """Of the sets that ``rank`` leads; empty where it leads none."""
    led = [[found.what, list(found.names)] for found in sets if found.leader == rank]
    return zlib.compress(json.dumps(led).encode()) if led else b""


def unpack_names(packed: bytes, rank: int) -> list[TensorSet]:
    if not packed.rstrip(b"\0"):
        return []
    text = zlib.decompressobj().decompress(packed)  # what follows its end is padding
    return [TensorSet(what, rank, tuple(names)) for what, names in json.loads(text)]
