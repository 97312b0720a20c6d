"""Datasets of the user's own code: ``data=custom data.target=my.package.Dataset``."""
