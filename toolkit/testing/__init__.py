"""The test harness: worker pools, tiny models, and the parity matrix that compares engines."""
