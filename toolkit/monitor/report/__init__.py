"""A run's directory as one page: ``run_data.py`` reads, each section's module decides what it shows, ``page.py`` puts them together."""
