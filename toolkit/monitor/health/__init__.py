"""What is wrong with a run, by its rows: detectors, and how often people hear of it. Pure."""
