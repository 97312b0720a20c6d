"""Whether Megatron-core uses Transformer Engine, whose versions megatron-core 0.16.1 limits.

The range is that of the package's metadata: ``transformer-engine[core_cu13,pytorch]>=2.9.0a0,<2.12.0``.
"""

from __future__ import annotations

from toolkit.plan.types import Device, World

TESTED = ">=2.9,<2.12"
NEWEST = "2.11.0"  # of the range, for plans of machines that have everything
COST = (
    "without it norms and linear layers are not fused, attention is not cuDNN's, and there is no FP8, no "
    "fused rotary embedding and no grouped matrix product of experts"
)


def fits_megatron(version: str) -> bool:
    """Return whether this version of Transformer Engine is in the range. Suffixes of builds do not matter."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).base_version in SpecifierSet(TESTED)
    except InvalidVersion:
        return False


def has_transformer_engine(world: World) -> bool:
    """Return whether ranks on ``world`` use its layers, if they run Megatron-core."""
    version = world.transformer_engine
    return world.device is Device.CUDA and version is not None and fits_megatron(version)


def install_command(torch_cuda: str | None) -> str:
    """Return the command that installs it for torch's version of CUDA. Its extension is compiled on the
    machine.
    """
    core = "core" if torch_cuda is None else f"core_cu{torch_cuda.partition('.')[0]}"
    return f"pip install --no-build-isolation 'transformer-engine[{core},pytorch]{TESTED}'"
