"""One file a model family: shapes, parameter counts, FLOPs, canonical names, invertible name maps. No torch."""
