"""Observers of a run, set up by ``monitoring.py``. They import ``toolkit/monitor``, which has the pure parts.

ledger.py, gather.py        step times of all ranks; monitor/health/throughput.py detects a slow rank
health.py, system.py        run the detectors of monitor/health on the rows of rank 0 and of each node
watchdog.py                 ends a run without progress; hang_reporter.py writes its report, hang.txt
progress_hooks.py           metrics, status.json, plots; cluster/exit_handling.py writes the final status
replicas.py, comm_benchmark.py, profiler.py, process_stats.py, goodput_tracker.py    one measurement each
"""
