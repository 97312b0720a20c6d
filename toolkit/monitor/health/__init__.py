"""Detectors of problems, and the rate limit of their alerts."""
