"""Memory, speed, power and architecture of GPUs by name.

For an unknown GPU the plan reports neither memory fit nor utilisation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from toolkit.plan.types import World

MIB = 2**20
# Environment variables with which a process sees no GPU, of NVIDIA and of AMD.
HIDE_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


class Architecture(StrEnum):
    VOLTA = "volta"
    TURING = "turing"
    AMPERE = "ampere"
    ADA = "ada"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"
    CDNA = "cdna"  # of AMD


VOLTA, TURING, AMPERE, ADA, HOPPER, BLACKWELL, CDNA = Architecture


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """Figures of one kind of GPU, from the manufacturer's data sheet.

    Attributes:
        memory_bytes: as reported by the driver, a little less than in the data sheet.
        peak_flops: dense 16-bit FLOP/s with fp32 accumulation: half of the "with sparsity" figure of data
            sheets.
        bandwidth: memory bandwidth in bytes per second.
        design_watts: thermal design power; of the MI250X that of one die, half of 560.
    """

    memory_bytes: int
    peak_flops: float
    bandwidth: float
    design_watts: int
    architecture: Architecture

    @property
    def has_bf16(self) -> bool:
        """NVIDIA GPUs have bf16 since compute capability 8.0."""
        return self.architecture not in (VOLTA, TURING)

    @property
    def has_fp8(self) -> bool:
        """Whether it has matrix products of float8_e4m3fn, since compute capability 8.9 (NVIDIA's Ada and
        Hopper architecture whitepapers, 2022). AMD's MI300 series has another format, e4m3fnuz.
        """
        return self.architecture in (ADA, HOPPER, BLACKWELL)


GPUS: dict[str, GpuSpec] = {
    # NVIDIA GB300 NVL72 product page (2025): 360 PFLOP/s bf16 with sparsity of 72, so 2.5 dense; 20 TB and
    # 576 TB/s of 72
    "gb300": GpuSpec(284208 * MIB, 2.5e15, 8.0e12, 1400, BLACKWELL),
    # NVIDIA HGX B300 data sheet (2025): 36 PFLOP/s bf16 with sparsity of 8, so 2.25 dense; 2.1 TB of 8, 8
    # TB/s
    "b300": GpuSpec(275040 * MIB, 2.25e15, 8.0e12, 1100, BLACKWELL),
    # NVIDIA GB200 NVL72 data sheet (2024): 360 PFLOP/s bf16 with sparsity of 72, so 2.5 dense; 186 GB, 8 TB/s
    "gb200": GpuSpec(189471 * MIB, 2.5e15, 8.0e12, 1200, BLACKWELL),
    # NVIDIA HGX B200 data sheet (2024): 2.25 PFLOP/s dense bf16, 192 GB HBM3e of which 183,359 MiB are
    # reported, 8 TB/s
    "b200": GpuSpec(183359 * MIB, 2.25e15, 8.0e12, 1000, BLACKWELL),
    # NVIDIA GH200 data sheet (2023), 96 GB HBM3 form: the H100's compute, 4 TB/s
    "gh200": GpuSpec(97871 * MIB, 989.4e12, 4.0e12, 700, HOPPER),
    # NVIDIA H200 data sheet (2024): 989 TFLOP/s dense bf16, 141 GB, 4.8 TB/s; NVL 835.5
    "h200": GpuSpec(143771 * MIB, 989.4e12, 4.8e12, 700, HOPPER),
    "h200-nvl": GpuSpec(143771 * MIB, 835.5e12, 4.8e12, 600, HOPPER),
    # NVIDIA H100 data sheet (2023): SXM5 989 TFLOP/s dense bf16, 80 GB, 3.35 TB/s; PCIe 756 and 2.0; NVL 835,
    # 94 GB and 3.9
    "h100": GpuSpec(81559 * MIB, 989.4e12, 3.35e12, 700, HOPPER),
    "h100-pcie": GpuSpec(81559 * MIB, 756e12, 2.0e12, 350, HOPPER),
    "h100-nvl": GpuSpec(95830 * MIB, 835e12, 3.9e12, 400, HOPPER),
    # NVIDIA A100 data sheet (2021): 312 TFLOP/s dense bf16; 40 GB at 1.555 TB/s, 80 GB at 2.039 TB/s (SXM)
    "a100-40gb": GpuSpec(40960 * MIB, 312e12, 1.555e12, 400, AMPERE),
    "a100-80gb": GpuSpec(81920 * MIB, 312e12, 2.039e12, 400, AMPERE),
    # NVIDIA A30 data sheet (2021): 165 TFLOP/s dense bf16, 24 GB at 933 GB/s
    "a30": GpuSpec(24576 * MIB, 165e12, 0.933e12, 165, AMPERE),
    # NVIDIA L40S data sheet (2023): 362 TFLOP/s dense bf16, 48 GB GDDR6 at 864 GB/s; L40 data sheet (2022):
    # 181
    "l40s": GpuSpec(46068 * MIB, 362e12, 0.864e12, 350, ADA),
    "l40": GpuSpec(46068 * MIB, 181e12, 0.864e12, 300, ADA),
    # NVIDIA L4 data sheet (2023): 121 TFLOP/s dense bf16, 24 GB at 300 GB/s
    "l4": GpuSpec(23034 * MIB, 121e12, 0.3e12, 72, ADA),
    # NVIDIA A40 data sheet (2021): 149.7 TFLOP/s dense bf16, 48 GB at 696 GB/s
    "a40": GpuSpec(46068 * MIB, 149.7e12, 0.696e12, 300, AMPERE),
    # NVIDIA A10 data sheet (2021): 125 TFLOP/s dense bf16, 24 GB at 600 GB/s; A10G data sheet (2022): 70
    "a10": GpuSpec(23028 * MIB, 125e12, 0.6e12, 150, AMPERE),
    "a10g": GpuSpec(23028 * MIB, 70e12, 0.6e12, 300, AMPERE),
    # NVIDIA RTX Blackwell PRO architecture whitepaper (2025): 503.8 TFLOP/s dense bf16, 96 GB GDDR7 at 1.79
    # TB/s
    "rtx-pro-6000": GpuSpec(97887 * MIB, 503.8e12, 1.792e12, 600, BLACKWELL),
    # NVIDIA Ada architecture whitepaper (2023): RTX 6000 Ada 364.2 TFLOP/s dense bf16, 48 GB at 960 GB/s
    "rtx-6000-ada": GpuSpec(49140 * MIB, 364.2e12, 0.96e12, 300, ADA),
    # NVIDIA Ampere GA102 architecture whitepaper (2021): RTX A6000 154.8 TFLOP/s dense bf16, 48 GB at 768
    # GB/s
    "rtx-a6000": GpuSpec(49140 * MIB, 154.8e12, 0.768e12, 300, AMPERE),
    # Whitepapers of the RTX Blackwell (2025), Ada (2022) and Ampere GA102 (2020) architectures. GeForce GPUs
    # are half as fast with fp32 accumulation as with fp16 accumulation, for which larger figures are
    # published.
    "rtx-5090": GpuSpec(32607 * MIB, 209.5e12, 1.792e12, 575, BLACKWELL),
    "rtx-4090": GpuSpec(24564 * MIB, 165.2e12, 1.008e12, 450, ADA),
    "rtx-3090": GpuSpec(24576 * MIB, 71e12, 0.936e12, 350, AMPERE),
    # NVIDIA V100 data sheet (2020): SXM2 125 TFLOP/s fp16 and no bf16, PCIe 112; 900 GB/s
    "v100-16gb": GpuSpec(16384 * MIB, 125e12, 0.9e12, 300, VOLTA),
    "v100-32gb": GpuSpec(32768 * MIB, 125e12, 0.9e12, 300, VOLTA),
    "v100-pcie-16gb": GpuSpec(16384 * MIB, 112e12, 0.9e12, 250, VOLTA),
    "v100-pcie-32gb": GpuSpec(32768 * MIB, 112e12, 0.9e12, 250, VOLTA),
    # NVIDIA T4 data sheet (2019): 65 TFLOP/s fp16 and no bf16; 16 GB at 320 GB/s
    "t4": GpuSpec(15360 * MIB, 65e12, 0.32e12, 70, TURING),
    # AMD Instinct MI325X data sheet (2024): the MI300X's compute, 256 GB HBM3E at 6 TB/s
    "mi325x": GpuSpec(262128 * MIB, 1307.4e12, 6.0e12, 1000, CDNA),
    # AMD Instinct MI300X data sheet (2023): 1,307.4 TFLOP/s dense bf16, 192 GB HBM3 at 5.3 TB/s
    "mi300x": GpuSpec(196592 * MIB, 1307.4e12, 5.3e12, 750, CDNA),
    # AMD Instinct MI250X data sheet (2021), one of its two dies: 191.5 TFLOP/s bf16, 64 GB at 1.6 TB/s
    "mi250x": GpuSpec(65520 * MIB, 191.5e12, 1.6e12, 280, CDNA),
}

# Parts of names of variants with other speeds: slices, laptop or low-power GPUs, other numbers of cores.
VARIANTS = {"mig", "laptop", "max", "mobile", "d", "ti", "super", "cnx"}


def normalise_gpu_name(name: str) -> str | None:
    """Return the key of ``GPUS`` for a name as a driver or a user writes it; None if it is unknown.

    ``NVIDIA A100-SXM4-80GB`` -> ``a100-80gb``. The longest key whose parts all occur in the name matches.
    """
    parts = set(re.findall(r"[a-z0-9]+", name.lower()))
    matches = [] if parts & VARIANTS else [key for key in GPUS if set(key.split("-")) <= parts]
    return max(matches, key=len, default=None)


def find_gpu(name: str | None) -> GpuSpec | None:
    """Return the figures of the GPU called ``name``; None if the name is None or unknown."""
    key = normalise_gpu_name(name) if name else None
    return GPUS[key] if key else None


def memory_bytes(world: World) -> int | None:
    """Return the memory of one device, as measured on the machine or else from the table; None if unknown."""
    known = find_gpu(world.gpu)
    return world.device_memory_bytes or (known.memory_bytes if known else None)
