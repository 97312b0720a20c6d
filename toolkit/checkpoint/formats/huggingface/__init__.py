"""Hugging Face folders: ``config.json`` and safetensors. ``source.py`` reads them, ``target.py`` writes
them."""
