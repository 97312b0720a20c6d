"""Readers (``source.py``) and writers (``target.py``) of checkpoint formats, and the file formats that
they share.

To add a format, write a module with ``find`` and ``open_source`` and list it in ``FORMATS`` of
``toolkit/checkpoint/source.py``. To write it too, write a module with ``lay_out`` and list it in ``WRITERS``
of ``toolkit/checkpoint/offline/reshard.py``.
"""
