"""Data for training: token and record folders, deterministic sample order, remote stores, and data preparation."""
