#!/usr/bin/env bash
# Installs what the toolkit needs into the Python of a base image. Dockerfile and Apptainer.def run it.
#   docker/install.sh                     every version of constraints.txt
#   KEEP_TORCH=1 docker/install.sh        the base's own torch stays, and what was built against it
#   TORCH_INDEX=URL docker/install.sh     torch from this index, all else from pip's own
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install=(python -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore)

python docker/lock.py write "$work" ${KEEP_TORCH:+--keep}
# NVIDIA's image pins all that it has (PIP_CONSTRAINT); what has to stay is pinned in our constraints.
unset PIP_CONSTRAINT
if [ -z "${KEEP_TORCH:-}" ] && [ -n "${TORCH_INDEX:-}" ]; then
  "${install[@]}" --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' "$work/constraints.txt")"
fi
DS_BUILD_OPS=0 "${install[@]}" -c "$work/constraints.txt" -r "$work/requirements.txt"
python docker/lock.py check "$work"
