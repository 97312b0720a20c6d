"""DeepSpeed as an engine. Only modules in this folder import ``deepspeed``."""
