"""Sweeps: Hydra's sweeper generates points; each is planned before it is queued, runs as one job, and never
runs twice.
"""
