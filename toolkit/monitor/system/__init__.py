"""GPUs and hosts, sampled beside training."""
