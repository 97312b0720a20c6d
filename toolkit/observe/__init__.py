"""Observers of a run, set up by ``monitoring.py``. They import ``toolkit/monitor``, which has the pure parts.

ledger.py, gather.py        step times of all ranks; monitor/health/throughput.py detects a slow rank
health.py, system.py        run the detectors of monitor/health on the rows of rank 0 and of each node
watchdog.py                 ends a run without progress; hang_reporter.py writes its report, hang.txt
progress_hooks.py           metrics, status.json, plots; the final status: cluster/attempt/exit_handling.py
replicas.py, comm_benchmark.py, profiler.py, process_stats.py, goodput_tracker.py    one measurement each
"""
