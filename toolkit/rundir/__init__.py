"""The folder of one run: what each start writes there, who may write, and which state a start resumes from.

    config.yaml plan.json status.json          of the newest attempt
    metrics.jsonl eval.jsonl ledger.jsonl      each step once, over all attempts
    hooks.jsonl                                metrics that the user's hooks log
    rollbacks.jsonl                            each time that the run went back to a checkpoint, or ended
                                               because it could not
    departures.jsonl                           each time that a check named a node with wrong values, and what
                                               the run did (monitor.on_wrong_computation=leave)
    alerts.jsonl alerts/node-N.jsonl           in order of time; those of other nodes in separate files
    system/node-N.jsonl                        in order of time, for each node
    checkpoints/ plots/ export/
    uploads/                                   what has been uploaded to checkpoint.url
    excluded_hosts.json                        hosts that the next start on Slurm must not use
    attempts/001/{config.yaml,plan.json,environment.json,log.txt,times.json,saves.jsonl}
                                               and metric rows and checkpoints of steps that this or a later
                                               attempt repeated
    attempts/001/restart.json                  the phases of the restart that started the attempt
    attempts/001/{hang.txt,hang/}              if the attempt ended because it made no progress
    jobs/001/                                  of a submitted run: toolkit/cluster/jobs/job.py
    fork.json                                  the parent of a forked run
    lock                                       locked while a process runs here

Only rank 0, or the parent process that starts the ranks, writes here, with two exceptions: each node's first
rank writes the node's files, and any rank may report a hang.
"""
