"""DeepSpeed's own checkpoints: ZeRO 0 to 3, AutoTP and pipelines. ``source.py`` reads them, ``target.py``
writes them."""
