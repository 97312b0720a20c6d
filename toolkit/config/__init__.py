"""The typed schema of a run, and its composition from groups, files and overrides."""
