"""Processes of a run, jobs of a cluster, the doctor and sweeps.

entry_point.py, launch_process.py     one process: rank, supervisor of ranks, or sweep
stop_request.py, exit_handling.py     signals and notices; exit codes and the final status
supervisor.py, requeue.py             decide_restart: ranks of this machine; decide: a Slurm job
backends/                             one module per cluster, with the protocol of job.py
doctor/                               one module per kind of check, listed in preflight.py: CHECKS
"""
