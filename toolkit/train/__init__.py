"""Training: the loop, a run from plan to exit code, and saving, evaluation and resuming."""
