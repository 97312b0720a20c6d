#!/bin/bash
# gpt-0123abcd, job 1: one distributed training, one task a node (1). Made by launch/submit.py.

asked=none  # by which signal this script was asked to end
ask() {
  asked=$1
  # srun itself answers SIGTERM by killing its tasks; Slurm passes it on.
  scancel --signal=TERM "$SLURM_JOB_ID"
}
trap 'ask TERM' TERM  # the time limit or a preemption is near: save, and go on later
trap 'ask INT' INT    # somebody stops the run: save, and that is all

set -uo pipefail
python=/opt/venv/bin/python
folder=/data/runs/gpt-0123abcd/jobs/001
train=(/repo/launch/train.py --frozen=/data/runs/gpt-0123abcd/jobs/001/config.yaml)
srun=(--nodes=1 --ntasks-per-node=1 --cpu-bind=none --input=none --kill-on-bad-exit=0 --wait=90)
task=("$python" -u "${train[@]}")

code=75
if [ "$asked" = none ]; then
  srun "${srun[@]}" "${task[@]}" &
  step=$!
  while kill -0 "$step" 2>/dev/null; do  # a signal ends a wait, and not the tasks
    wait "$step"
    code=$?
  done
fi
trap '' TERM INT  # from here on it is decided, whoever asks
"$python" -m toolkit.cluster.requeue "$folder" --asked="$asked" --code="$code"
