#!/bin/bash
# gpt-0123abcd, job 1: one distributed training, one task a node (4). Made by launch/submit.py.

asked=none  # by which signal this script was asked to end
ask() {
  asked=$1
  # srun itself answers SIGTERM by killing its tasks; Slurm passes it on.
  scancel --signal=TERM "$SLURM_JOB_ID"
}
trap 'ask TERM' TERM  # the time limit or a preemption is near: save, and go on later
trap 'ask INT' INT    # somebody stops the run: save, and that is all

# cluster.slurm.setup
module load cuda/12.8
export NCCL_DEBUG="WARN"

set -uo pipefail
python=/opt/venv/bin/python
folder=/data/runs/gpt-0123abcd/jobs/001
train=(/repo/launch/train.py --frozen=/data/runs/gpt-0123abcd/jobs/001/config.yaml)
srun=(--nodes=4 --ntasks-per-node=1 --cpu-bind=none --input=none --kill-on-bad-exit=0 --wait=90 --cpus-per-task=64)
addresses=" $(scontrol --oneliner show node "$SLURM_JOB_NODELIST" |
  sed -n 's/^NodeName=\([^ ]*\) .* NodeAddr=\([^ ]*\).*/\1=\2/p' | tr '\n' ' ')"  # " n1=10.0.0.1 n2=10.0.0.2 "
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=${addresses#* "$first"=}
address=${address%% *}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=75  # what torchrun leaves its ranks to save in; else 30 s
# shellcheck disable=SC2016  # the task's own shell fills these in
node='own=${1#* $SLURMD_NODENAME=}; shift
export PET_LOCAL_ADDR=${own%% *} PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0)); exec "$@"'
task=(bash -c "$node" node "$addresses" "$python" -u -m torch.distributed.run --nnodes=4 --nproc-per-node=8
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="${address:-$first}:$((20000 + SLURM_JOB_ID % 10000))"
  --max-restarts=3 "${train[@]}")

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
