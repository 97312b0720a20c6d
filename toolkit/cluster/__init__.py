"""Processes of a run, jobs of a cluster, the doctor and sweeps.

entry_point.py       every training process starts here: a rank, a supervisor, a standby, a relay or a sweep
launch_process.py    one process of a launch: a rank, or the supervisor of the ranks of this machine
supervisor.py        starts these ranks, and restarts them after a failure
cpu_affinity.py      binds a rank to the cores near its GPU

A folder imports only those above it:

world/        the launcher, the ranks and nodes, their hardware, and the rendezvous of the ranks
stop/         requests to stop, and what an elastic run does after a stop
jobs/         jobs as seen from outside; jobs/backends/ has one module per cluster
attempt/      one start of a run: its frozen configuration, rank processes, log and exit codes
standbys/     warm processes that take the places of failed ranks
doctor/       one module per kind of check, listed in preflight.py: CHECKS
sweep/        many runs
"""
