"""Megatron-core as an engine. Only modules in this folder import ``megatron``."""

import warnings

# Each of its modules says at its import what is not installed (of that, model.py takes what is there), it calls collectives by names
# that torch has renamed, and it recommends for GPUs what cluster/environment.py sets there.
for message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "When using sequence parallelism it is recommended",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
):
    warnings.filterwarnings("ignore", message=message, category=UserWarning)
warnings.filterwarnings("ignore", message=".*torch.distributed.*deprecated", category=FutureWarning)
