"""PyTorch's distributed checkpoints (DCP). ``source.py`` reads them; ``metadata.py`` also writes
``.metadata`` for Megatron-core."""
