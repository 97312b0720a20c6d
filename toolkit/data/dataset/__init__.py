"""Training straight from a local or hub ``datasets`` source: read in arrow batches, tokenised on the way by worker processes."""
