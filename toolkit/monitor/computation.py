"""Find the rank that computes wrong values, from what data ranks computed of the same micro-batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolkit.monitor.alert import Alert, Level

SHOWN = 4  # ranks in a sentence


@dataclass(frozen=True, slots=True)
class RankForward:
    """Two forward passes of one micro-batch on one rank.

    Attributes:
        place: pipeline, context and tensor coordinates. Ranks at one place compute the same values.
        passes: for each pass the hashes of the outputs by module, in the order of the calls.
    """

    rank: int
    place: tuple[int, int, int]
    host: str
    device: str
    passes: tuple[Mapping[str, int], Mapping[str, int]]

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.device})"


@dataclass(frozen=True, slots=True)
class ForwardDifference:
    """The first module whose outputs are not equal.

    Attributes:
        peers: all ranks that should have computed the same.
        unstable: those whose own two passes differ.
        faulty: those that compute wrong values; empty if that is unknown.
    """

    module: str
    peers: tuple[RankForward, ...]
    unstable: tuple[RankForward, ...]
    faulty: tuple[RankForward, ...]

    @property
    def suspects(self) -> tuple[RankForward, ...]:
        return self.faulty or self.peers

    @property
    def confirmed_faulty(self) -> tuple[RankForward, ...]:
        """The faulty ranks; none if no other rank shows that the kernels are deterministic."""
        return self.faulty if any(peer not in self.faulty for peer in self.peers) else ()

    @property
    def confirmed_faulty_hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rank.host for rank in self.confirmed_faulty))


def find_difference(forwards: Sequence[RankForward]) -> ForwardDifference | None:
    """Return the first difference in the order of execution: what follows it has wrong inputs.

    A rank is faulty if its own passes differ and those of at least half of its peers agree, or if the
    majority of its peers computed another value. If most ranks differ from themselves, the kernels are not
    deterministic.
    """
    places: dict[tuple[int, int, int], list[RankForward]] = defaultdict(list)
    for forward in forwards:
        places[forward.place].append(forward)
    found = []
    for place, peers in places.items():
        modules = dict.fromkeys(name for peer in peers for each in peer.passes for name in each)
        for number, module in enumerate(modules):
            if len({each.get(module) for peer in peers for each in peer.passes}) > 1:
                found.append(((place[0], number), module, peers))
                break
    if not found:
        return None
    _, module, peers = min(found, key=lambda each: each[0])
    unstable = [peer for peer in peers if peer.passes[0].get(module) != peer.passes[1].get(module)]
    if unstable:
        faulty = unstable if len(peers) == 1 or 2 * len(unstable) <= len(peers) else []
    else:
        usual, votes = Counter(peer.passes[0].get(module) for peer in peers).most_common(1)[0]
        majority = 2 * votes > len(peers)
        faulty = [peer for peer in peers if peer.passes[0].get(module) != usual] if majority else []
    stage = peers[0].place[0]
    several = any(forward.place[0] != stage for forward in forwards)
    name = f"{module} of pipeline stage {stage}" if several else module  # stages number their own layers
    return ForwardDifference(name, tuple(peers), tuple(unstable), tuple(faulty))


def make_alert(step: int, difference: ForwardDifference, equal_at: int | None) -> Alert:
    """Describe the difference that the check after ``step`` found.

    Args:
        equal_at: the step of the last check without a difference; None: none is known.
    """
    suspects, module = difference.suspects, difference.module
    others = [peer for peer in difference.peers if peer not in suspects]
    names = _join(suspects)
    if difference.faulty and difference.unstable:
        agree = f", while {_join(others)} computed the same twice" if others else ""
        cause = f"{names} computed two different outputs of {module} from one micro-batch{agree}"
    elif difference.faulty:
        cause = f"{names} computed another output of {module} from one micro-batch than {_join(others)}"
    elif difference.unstable:
        cause = (
            f"{_join(difference.unstable)} computed two different outputs of {module} from one micro-batch: "
            "kernels are not deterministic, or several ranks compute wrong values"
        )
    else:
        cause = f"{names} computed different outputs of {module} from one micro-batch; one of them is wrong"
    since = f"equal after step {equal_at}" if equal_at is not None else "not seen equal before"
    before = f"before step {equal_at + 1}" if equal_at is not None else "from before the fault"
    hosts = list(dict.fromkeys(suspect.host for suspect in suspects))
    exclude = f"cluster.slurm.exclude={hosts[0]}"
    if len(hosts) > 1:
        exclude = f"""'cluster.slurm.exclude="{",".join(hosts)}"'"""
    numbers = ", ".join(str(suspect.rank) for suspect in suspects[:SHOWN])
    return Alert(
        name="replicas-differ",
        fault="computation",
        where=f"rank{'s' if len(suspects) > 1 else ''} {numbers}{_rest(suspects)}",
        level=Level.ERROR,
        step=step,
        cause=cause,
        evidence=f"64-bit hashes of the outputs of {len(difference.peers[0].passes[0])} modules in two "
        f"forward passes after step {step}; {since}",
        next_step=f"stop, and start the same command without {', '.join(hosts[:SHOWN])} (Slurm: {exclude}) "
        f"with resume=RUN_DIR/checkpoints/step-N of a checkpoint {before}; test the hardware: "
        "dcgmi diag -r 3, and memtest for the host. If ranks on many hosts differ, the hosts or their "
        "software are not alike, or kernels are not deterministic (check with debug.deterministic=true)",
    )


def _join(forwards: Sequence[RankForward]) -> str:
    return ", ".join(map(str, forwards[:SHOWN])) + _rest(forwards)


def _rest(forwards: Sequence[RankForward]) -> str:
    return f" and {len(forwards) - SHOWN} more" if len(forwards) > SHOWN else ""
