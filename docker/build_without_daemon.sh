#!/usr/bin/env bash
# Builds the CPU image without a Docker daemon, on a base made here, and trains the quickstart by its entry point. Root, on Debian.
#   docker/build_without_daemon.sh [FOLDER]      needs buildah and debootstrap, a registry of Python packages, and 15 GB in FOLDER,
#                                                which is removed at the end; without one, a temporary folder
#   DEBIAN_MIRROR=URL TORCH_INDEX=URL            where packages come from; else Debian's own, and where pip looks here
# What pip is told here (its configuration, PIP_*, the certificates) it is told in the build, and the image does not keep it.
set -euo pipefail
# Mounts of its own: whatever ends this, none is left behind.
if [ -z "${OWN_MOUNTS:-}" ]; then OWN_MOUNTS=1 exec unshare --mount "$0" "$@"; fi
work=${1:-}
if [ -n "$work" ]; then mkdir "$work"; else work=$(mktemp -d); fi
work=$(realpath "$work")
cd "$(dirname "$0")/.."
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
image=localhost/toolkit:test
# No daemon, no namespaces, no overlay: what a container itself may do.
store=(buildah --root "$work/store" --runroot "$work/run" --storage-driver vfs)
finish() {
  ! mountpoint -q "$work/base/proc" || umount "$work/base/proc"
  rm -rf --one-file-system "$work"
}
trap finish EXIT
say() { printf -- '---- %s (%d s)\n' "$1" "$SECONDS"; }

say "a base with Python, from $mirror"
debootstrap --variant=minbase --include=python3,python3-dev,python3-pip,python-is-python3,ca-certificates bookworm "$work/base" "$mirror" \
  > "$work/debootstrap.log" || { tail -n 20 "$work/debootstrap.log"; exit 1; }
# The base is the image's own, as python:3.11-slim is: there is no other owner of its packages (PEP 668).
rm -f "$work"/base/usr/lib/python3*/EXTERNALLY-MANAGED
container=$("${store[@]}" from scratch)
"${store[@]}" add --quiet "$container" "$work/base" / > /dev/null
"${store[@]}" commit --quiet --rm "$container" localhost/base:test > /dev/null
rm -rf --one-file-system "$work/base"

say "the image, by the steps of Dockerfile"
mounts=(--volume /etc/ssl/certs:/etc/ssl/certs:ro)
while read -r folder; do mounts+=(--volume "$folder:$folder:ro"); done < <(python3 docker/pip_here.py "$work/pip.conf")
"${store[@]}" build --isolation chroot --format docker --build-arg BASE=localhost/base:test --build-arg TORCH_INDEX="${TORCH_INDEX:-}" \
  --build-arg REVISION="$(git rev-parse HEAD 2> /dev/null || true)" --secret "id=pip,src=$work/pip.conf" "${mounts[@]}" --tag "$image" .

say "its entry point trains"
container=$("${store[@]}" from "$image")
inspect() { "${store[@]}" inspect --type image --format "$1" "$image"; }
printf 'entry point %s, user %s, health %s\n' "$(inspect '{{.OCIv1.Config.Entrypoint}}')" "$(inspect '{{.OCIv1.Config.User}}')" \
  "$(inspect '{{.Docker.Config.Healthcheck.Test}}')"
inside() { "${store[@]}" run --isolation chroot "$container" -- "$@"; }
inside bash -c '[ ! -s /etc/pip.conf ]'  # what pip was told is in no layer
entry=(tini -- python /opt/toolkit/launch/train.py +exp=quickstart cluster.gpus_per_node=0)
inside "${entry[@]}" cluster.cpu_ranks=2 run.dir=runs/built train.steps=3
inside python -c 'import json, os
status = json.load(open("runs/built/status.json"))
print("trained: status", status["state"], "at step", str(status["step"]) + ", as user", os.stat("runs/built/status.json").st_uid)'
say "what a pod of Kubernetes runs, on the same run"
inside tini -- python -u -m toolkit.cluster.pod --config=runs/built/config.yaml
say "its init passes a stop on, and the run saves"
code=0
# shellcheck disable=SC2016  # the shell inside fills these in
inside bash -c '"$@" & pid=$!
  until grep -q running runs/stopped/status.json 2> /dev/null; do sleep 0.5; kill -0 $pid || exit 1; done
  echo "health: $(python -m toolkit.cluster.health)"; kill -TERM $pid && wait $pid' \
  stop "${entry[@]}" run.dir=runs/stopped train.steps=100000 || code=$?
inside python -c 'import json
print("stopped: status", json.load(open("runs/stopped/status.json"))["state"] + ", exit code", '"$code"')'
say "done"
