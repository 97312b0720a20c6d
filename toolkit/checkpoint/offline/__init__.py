"""Work on checkpoints without a training run: convert, plan, inspect, verify and compare them."""
