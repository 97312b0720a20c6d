"""The folder of one run: who may write there, what each start leaves behind, and where its state comes from.

    config.yaml plan.json status.json          of the newest attempt
    metrics.jsonl eval.jsonl ledger.jsonl      each step once, over all attempts
    alerts.jsonl alerts/node-N.jsonl           as they came; of other nodes than the first
    system/node-N.jsonl                        as they came, of each node
    checkpoints/ plots/
    attempts/001/{config.yaml,plan.json,environment.json,log.txt,times.json,saves.jsonl}, and metric rows and checkpoints of steps that a
                                               later attempt ran again
    attempts/001/{hang.txt,hang/}              of one that ended for want of progress
    jobs/001/                                  of one that was submitted: toolkit/cluster/job.py
    fork.json                                  the parent, in a run that began from another one's state
    lock                                       held while a process runs here

Only rank 0, or the parent that starts the ranks, writes; and each node's first rank what is of its node; and whichever rank reports a hang.
"""
