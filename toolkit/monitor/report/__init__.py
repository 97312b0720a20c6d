"""The HTML report of a run: ``run_reader.py`` reads the files, one module builds each section, ``page.py``
renders them.
"""
