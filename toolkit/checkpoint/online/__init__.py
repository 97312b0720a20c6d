"""Save checkpoints during training, in the background and with an atomic commit."""
