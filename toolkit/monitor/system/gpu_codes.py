"""The meaning of codes of NVIDIA's driver: reasons for lowered clocks, and XID events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.monitor.alert import Level


@dataclass(frozen=True, slots=True)
class ThrottleReason:
    """A reason for clocks below their maximum.

    Attributes:
        harmful: whether it indicates a fault of cooling, power supply or board. The others are intended: an
            idle GPU, clocks set by a user, or a GPU at its power limit, which large matrix products always
            reach.
    """

    name: str
    harmful: bool = False


# Bits of nvmlDeviceGetCurrentClocksEventReasons: NVML API reference, group NvmlClocksEventReasons.
# clocks halved or worse: heat, power brake, or too much power at once
REASONS: dict[int, ThrottleReason] = {
    0x001: ThrottleReason("idle"),
    0x002: ThrottleReason("application-clocks"),
    0x004: ThrottleReason("power-cap"),
    0x008: ThrottleReason("hardware-slowdown", harmful=True),
    0x010: ThrottleReason("sync-boost"),
    0x020: ThrottleReason("software-thermal", harmful=True),
    0x040: ThrottleReason("hardware-thermal", harmful=True),
    0x080: ThrottleReason("power-brake", harmful=True),  # requested by the machine's power supply
    0x100: ThrottleReason("display-clocks"),
    0x200: ThrottleReason("board-limit"),
    0x400: ThrottleReason("reliability"),
}
HARMFUL = frozenset(reason.name for reason in REASONS.values() if reason.harmful)


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return the names of the set bits, lowest first; ``bit-13`` for bits of newer drivers."""
    numbers = [number for number in range(bits.bit_length()) if bits >> number & 1]
    return tuple(
        REASONS[1 << number].name if 1 << number in REASONS else f"bit-{number}" for number in numbers
    )


def is_harmful(reasons: Sequence[str]) -> bool:
    return not HARMFUL.isdisjoint(reasons)


@dataclass(frozen=True, slots=True)
class XidInfo:
    """An error event of the driver.

    Attributes:
        meaning: a clause that follows "the driver reports".
        next_step: what to do first; INDEX stands for the argument of nvidia-smi -i.
    """

    meaning: str
    next_step: str
    level: Level = Level.ERROR


XID_SOURCE = "https://docs.nvidia.com/deploy/xid-errors/"
_PROGRAM = (
    "check the traceback of the rank on this GPU; if it does not help, run again under compute-sanitizer "
    "or with CUDA_LAUNCH_BLOCKING=1. The same number on one GPU only, with every program, indicates the "
    "hardware: dcgmi diag -r 3"
)
_RESET = (
    "exclude the node from the run, reset the GPU (nvidia-smi --gpu-reset -i INDEX) and test it: dcgmi "
    "diag -r 3; if the error recurs after a reset, contact the vendor"
)
_LATER = (
    "the run may continue; reset the GPU after it (nvidia-smi --gpu-reset -i INDEX), and watch for more of "
    "them"
)
_REBOOT = "exclude the node and restart it; if it happens again, have power, cooling, slot and GPU checked"
_FIRMWARE = (
    "reset the GPU or restart the node; if it happens again, install another driver and send the output of "
    "nvidia-bug-report.sh to NVIDIA"
)
_LINKS = (
    "check nvidia-smi nvlink -e and the fabric manager's log; reset all GPUs of the node together. A "
    "failed GPU also causes errors at the other ends of its links: look for other XIDs first"
)

# The events of the catalog in XID_SOURCE (with its first advice) that occur in training.
XIDS: dict[int, XidInfo] = {
    13: XidInfo(
        "an exception in the compute engine: a kernel used a wrong address or instruction, rarely a "
        "hardware fault",
        _PROGRAM,
    ),
    31: XidInfo("a page fault: a kernel touched GPU memory that is not mapped", _PROGRAM),
    32: XidInfo(
        "a corrupted command stream, rarely the program's fault: PCIe delivers it",
        "restart the run; if it happens again, have the GPU's slot and riser checked",
    ),
    43: XidInfo("that a program was stopped after its own fault; the GPU is healthy", _PROGRAM),
    45: XidInfo(
        "that a program's work was removed from the GPU, because it ended or because of an earlier error",
        "look for another XID or a traceback just before this one",
        Level.WARNING,
    ),
    46: XidInfo("that the GPU stopped working on its queue", _RESET),
    48: XidInfo("a double-bit memory error, which ECC cannot correct", _RESET),
    62: XidInfo("that the GPU's microcontroller halted", _RESET),
    63: XidInfo(
        "that a bad memory row was recorded and is remapped at the next reset", _LATER, Level.WARNING
    ),
    64: XidInfo("that a bad memory row could not be remapped", _RESET),
    69: XidInfo("a class error of the compute engine", _PROGRAM),
    74: XidInfo("an NVLink error", _LINKS),
    79: XidInfo("that the GPU has fallen off the bus: it cannot be reached through PCIe any more", _REBOOT),
    92: XidInfo(
        "many single-bit memory errors in a short time, corrected by ECC",
        "the run may continue; have the GPU tested after it: dcgmi diag -r 3",
        Level.WARNING,
    ),
    94: XidInfo(
        "a memory error that could not be corrected but was contained: it ended only the program that used "
        "that memory",
        "restart the run from its checkpoint; reset the GPU when it is convenient (nvidia-smi --gpu-reset "
        "-i INDEX)",
    ),
    95: XidInfo(
        "a memory error that could be neither corrected nor contained: all programs on the GPU are affected",
        _RESET,
    ),
    109: XidInfo("that a context switch on the GPU took too long", _RESET),
    119: XidInfo("that the GPU's system processor (GSP) did not answer the driver", _FIRMWARE),
    120: XidInfo("an error of the GPU's system processor (GSP)", _FIRMWARE),
    121: XidInfo("corrected errors of the link between processor and GPU (C2C)", _LATER, Level.WARNING),
    136: XidInfo("that an NVLink could not be trained", _LINKS),
    137: XidInfo("that a program used NVLink addresses of a peer without permission", _PROGRAM),
    140: XidInfo("a memory error that ECC could not correct and the driver could not recover from", _RESET),
    143: XidInfo("that the GPU could not be started", _RESET),
    **{number: XidInfo("an error of NVLink 5", _LINKS) for number in range(144, 151)},
    154: XidInfo(
        "which action the GPU needs to recover from another XID",
        "dmesg | grep 'recovery action' on the node shows which: a reset, a restart of the node or less",
        Level.WARNING,
    ),
    158: XidInfo("that the GPU did not answer at all for too long", _RESET),
    171: XidInfo("an error in the GPU's DRAM that ECC cannot correct (with XID 48)", _RESET),
    172: XidInfo("an error in the GPU's SRAM that ECC cannot correct (with XID 48)", _RESET),
}


def xid_info(number: int) -> XidInfo:
    return XIDS.get(
        number, XidInfo("an error that is not in this toolkit's table", f"look it up in {XID_SOURCE}")
    )
