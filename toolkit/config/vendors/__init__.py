"""Keys of DeepSpeed and Megatron-core, as JSON files generated from the packages."""
