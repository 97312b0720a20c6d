"""The engine protocol, its DeepSpeed and Megatron-core implementations, and the local reference engine."""
