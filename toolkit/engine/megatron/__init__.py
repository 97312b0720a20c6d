"""Megatron-core as an engine. Only modules in this folder import ``megatron``."""

import warnings

# Megatron-core warns at import about optional packages that are missing and calls collectives by names that
# torch renamed.
for message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
):
    warnings.filterwarnings("ignore", message=message, category=UserWarning)
warnings.filterwarnings("ignore", message=".*torch.distributed.*deprecated", category=FutureWarning)
