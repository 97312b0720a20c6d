"""Where rows go: files, the console, W&B."""
