#!/usr/bin/env bash
# Build the CPU image without a Docker daemon, on a base image created here, and train the quickstart in it. Root, on Debian.
#   docker/build_without_daemon.sh [FOLDER]      needs buildah, debootstrap, a Python package index, and 15 GB in FOLDER, which
#                                                is removed at the end; default: a temporary folder
#   DEBIAN_MIRROR=URL TORCH_INDEX=URL            package sources; default: Debian's, and pip's configuration here
# The build uses the pip configuration of this machine (files, PIP_*, certificates); the image does not keep it.
set -euo pipefail
# A mount namespace of its own, so that no mount is left behind however this ends.
if [ -z "${OWN_MOUNTS:-}" ]; then OWN_MOUNTS=1 exec unshare --mount "$0" "$@"; fi
work=${1:-}
if [ -n "$work" ]; then mkdir "$work"; else work=$(mktemp -d); fi
work=$(realpath "$work")
cd "$(dirname "$0")/.."
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
image=localhost/toolkit:test
# Without a daemon, namespaces and overlay, so that it also works in a container.
store=(buildah --root "$work/store" --runroot "$work/run" --storage-driver vfs)
finish() {
  ! mountpoint -q "$work/base/proc" || umount "$work/base/proc"
  rm -rf --one-file-system "$work"
}
trap finish EXIT
log() { printf -- '---- %s (%d s)\n' "$1" "$SECONDS"; }

log "base image with Python, from $mirror"
debootstrap --variant=minbase --include=python3,python3-dev,python3-pip,python-is-python3,ca-certificates bookworm "$work/base" "$mirror" \
  > "$work/debootstrap.log" || { tail -n 20 "$work/debootstrap.log"; exit 1; }
# Like python:3.11-slim, the image owns its Python packages (PEP 668).
rm -f "$work"/base/usr/lib/python3*/EXTERNALLY-MANAGED
container=$("${store[@]}" from scratch)
"${store[@]}" add --quiet "$container" "$work/base" / > /dev/null
"${store[@]}" commit --quiet --rm "$container" localhost/base:test > /dev/null
rm -rf --one-file-system "$work/base"

log "image, by the steps of the Dockerfile"
mounts=(--volume /etc/ssl/certs:/etc/ssl/certs:ro)
while read -r folder; do mounts+=(--volume "$folder:$folder:ro"); done < <(python3 docker/pip_here.py "$work/pip.conf")
"${store[@]}" build --isolation chroot --format docker --build-arg BASE=localhost/base:test --build-arg TORCH_INDEX="${TORCH_INDEX:-}" \
  --build-arg REVISION="$(git rev-parse HEAD 2> /dev/null || true)" --secret "id=pip,src=$work/pip.conf" "${mounts[@]}" --tag "$image" .

log "train through the entry point"
container=$("${store[@]}" from "$image")
inspect() { "${store[@]}" inspect --type image --format "$1" "$image"; }
printf 'entry point %s, user %s, health %s\n' "$(inspect '{{.OCIv1.Config.Entrypoint}}')" "$(inspect '{{.OCIv1.Config.User}}')" \
  "$(inspect '{{.Docker.Config.Healthcheck.Test}}')"
inside() { "${store[@]}" run --isolation chroot "$container" -- "$@"; }
inside bash -c '[ ! -s /etc/pip.conf ]'  # no layer contains the pip configuration
entry=(tini -- python /opt/toolkit/launch/train.py +exp=quickstart cluster.gpus_per_node=0)
inside "${entry[@]}" cluster.cpu_ranks=2 run.dir=runs/built train.steps=3
inside python -c 'import json, os
status = json.load(open("runs/built/status.json"))
print("trained: status", status["state"], "at step", str(status["step"]) + ", as user", os.stat("runs/built/status.json").st_uid)'
log "entry point of a Kubernetes pod, on the same run"
inside tini -- python -u -m toolkit.cluster.jobs.pod --config=runs/built/config.yaml
log "the init forwards a stop signal, and the run saves"
code=0
# shellcheck disable=SC2016  # expanded by the inner shell
inside bash -c '"$@" & pid=$!
  until grep -q running runs/stopped/status.json 2> /dev/null; do sleep 0.5; kill -0 $pid || exit 1; done
  echo "health: $(python -m toolkit.cluster.jobs.health)"; kill -TERM $pid && wait $pid' \
  stop "${entry[@]}" run.dir=runs/stopped train.steps=100000 || code=$?
inside python -c 'import json
print("stopped: status", json.load(open("runs/stopped/status.json"))["state"] + ", exit code", '"$code"')'
log "done"
