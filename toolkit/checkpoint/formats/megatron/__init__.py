"""Megatron-core's ``torch_dist`` checkpoints. ``source.py`` reads them, ``target.py`` writes them."""
