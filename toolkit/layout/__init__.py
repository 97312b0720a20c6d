"""The position of each rank on the axes of parallelism, without torch."""
