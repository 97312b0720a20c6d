"""Where each rank stands on the axes of parallelism. Pure; no torch."""
