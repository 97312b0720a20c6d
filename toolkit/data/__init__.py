"""Data for training: token and record folders, sample order, remote stores, and data preparation.

registry.py  the kinds of data (``data.name``), and how to add one; one module for each in ``kinds/``
order/       which samples a step has: ``permutation.py`` orders one source, ``mixture.py`` mixes several,
             ``stream.py`` cuts the order into micro-batches; ``samples.py``: a source of samples
tokens/      folders of tokens: index, tokenizer, reader and writer
records/     folders of fixed-size records, such as images
dataset/     training directly on a ``datasets`` source
custom/      training on a dataset of the user (``data.target``)
remote/      object stores: ``storage.py`` opens them, ``fetch.py`` retries requests, ``cache.py``
prepare/     text -> a folder of tokens
"""
