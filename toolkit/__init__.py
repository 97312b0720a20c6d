"""One run description, DeepSpeed or Megatron-core, any layout. Importing this package imports nothing heavy."""

__version__ = "0.1.0"
