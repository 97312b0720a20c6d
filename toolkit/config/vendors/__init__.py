"""Schemas of the engines' own settings, read from the source of the installed packages."""
