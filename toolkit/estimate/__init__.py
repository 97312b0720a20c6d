"""Predict the time of a planned run: operators, network, pipeline schedule, cost. No process, no GPU."""
