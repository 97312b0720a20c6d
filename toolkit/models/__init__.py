"""Build the modules of each family and their initial weights."""
