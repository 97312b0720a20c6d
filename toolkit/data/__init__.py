"""Data for training: token and record folders, sample order, remote stores, and data preparation."""
