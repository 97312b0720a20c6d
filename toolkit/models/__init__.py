"""Modules of each family, and their initial weights."""
