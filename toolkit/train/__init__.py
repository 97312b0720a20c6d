"""The loop and what hangs on it."""
