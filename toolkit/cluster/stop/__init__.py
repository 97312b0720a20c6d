"""Requests to stop a run.

stop_request.py    signals, and the death of the launcher; the training loop polls the flag
preemption.py      notices of the cloud
elastic_stop.py    whether an elastic run continues after its ranks have stopped
"""
