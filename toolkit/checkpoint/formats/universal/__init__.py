"""DeepSpeed's universal checkpoints. ``source.py`` reads them, ``target.py`` writes them."""
