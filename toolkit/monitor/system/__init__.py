"""Sampling of GPUs and hosts during training."""
