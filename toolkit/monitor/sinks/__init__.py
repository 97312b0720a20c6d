"""Sinks: files, the console and W&B."""
