"""One attempt of a run, from its start to its exit codes.

attempt_spec.py             the configuration, composed once and frozen for all ranks
rank_processes.py           the ranks of one machine as processes
node_snapshot_folder.py     the folder for snapshots in memory that the next attempt reads
output_log.py               the log
exit_handling.py            the exit code and the final status; tracebacks.py shortens the error output
"""
