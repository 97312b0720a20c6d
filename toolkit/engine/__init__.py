"""Doing: the plan carried out by plain torch, DeepSpeed or Megatron-core behind one protocol."""
