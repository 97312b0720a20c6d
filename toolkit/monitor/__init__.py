"""What is measured during training, how problems are detected, and where rows are written.

sink.py, sinks/       rows and their destinations
health/               detectors of problems, listed in build.py; their alerts: alert.py
hangs/                diagnosis of a run without progress
report/               the HTML report of a run
system/               samples of GPUs and hosts
"""
