"""One module for each kind of data (``data.name``), listed in toolkit/data/registry.py."""
