"""Training directly on a local or hub ``datasets`` source: worker processes tokenise text during training."""
