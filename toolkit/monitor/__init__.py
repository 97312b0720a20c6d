"""Measurements during training, the detection of problems in them, and the sinks that take rows.

sink.py, sinks/       rows and their destinations
health/               detectors of problems, listed in build.py; their alerts: alert.py
hangs/                diagnosis of a run without progress
report/               the HTML report of a run
system/               samples of GPUs and hosts
"""
