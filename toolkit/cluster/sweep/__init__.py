"""A sweep: points that Hydra's sweeper makes, each one distributed job, checked before it is queued and never run twice."""
