"""Checkpoints without a layout: named boxes of tensors in safetensors files and a manifest. Imports no engine."""
