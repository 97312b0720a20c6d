"""Megatron-core as an engine. Only modules in this folder import ``megatron``."""
