"""Readers (``source.py``) and writers (``target.py``) of checkpoint formats, and the file formats that
they share.
"""
