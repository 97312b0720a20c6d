"""One run description, DeepSpeed or Megatron-core, any layout. Importing this package is cheap."""

__version__ = "0.1.0"
