"""Megatron-core as an engine. Only modules in this folder import ``megatron``."""

import warnings

# Each of its modules says at its import what is not installed. Of that, model.py takes what is there.
for message in ("Transformer Engine and Apex are not installed", "Apex is not installed", "full scope is deprecated"):
    warnings.filterwarnings("ignore", message=message, category=UserWarning)
