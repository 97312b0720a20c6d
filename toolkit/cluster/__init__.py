"""Launching: start ranks, connect, supervise and stop them. Imports neither engine nor train."""
