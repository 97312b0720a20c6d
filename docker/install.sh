#!/usr/bin/env bash
# Install the toolkit's dependencies into the Python of a base image. Used by Dockerfile and Apptainer.def.
#   docker/install.sh                     every version of constraints.txt
#   KEEP_TORCH=1 docker/install.sh        keep the base's torch and the packages built against it
#   TORCH_INDEX=URL docker/install.sh     install torch from this index, everything else from pip's default
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install=(python -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore)

python docker/lock.py write "$work" ${KEEP_TORCH:+--keep}
# NVIDIA's image pins all its packages (PIP_CONSTRAINT); our constraints pin those that must stay.
unset PIP_CONSTRAINT
if [ -z "${KEEP_TORCH:-}" ] && [ -n "${TORCH_INDEX:-}" ]; then
  "${install[@]}" --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' "$work/constraints.txt")"
fi
DS_BUILD_OPS=0 "${install[@]}" -c "$work/constraints.txt" -r "$work/requirements.txt"
python docker/lock.py check "$work"
