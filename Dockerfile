# syntax=docker/dockerfile:1
# One file, two bases:
#   docker build -t toolkit .                                        CPU, every version of constraints.txt
#   docker build -t toolkit:gpu --build-arg BASE=nvcr.io/nvidia/pytorch:26.05-py3 --build-arg KEEP_TORCH=1 .
#                                                                    GPUs; keeps the base's torch (2.12)
#   docker run --rm -v "$PWD/runs:/workspace/runs" toolkit +exp=quickstart          arguments of launch/train.py
#   docker run --rm --entrypoint dmt toolkit plan +exp=quickstart                   every other command
#   docker run --rm --gpus all --ipc=host --stop-timeout 90 -v "$PWD/runs:/workspace/runs" toolkit:gpu +exp=quickstart
# A private index: --secret id=pip,src=$HOME/.config/pip/pip.conf. It is available while pip runs and in no layer.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG KEEP_TORCH=
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG VERSION=0.1.0
ARG REVISION=

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# g++: DeepSpeed compiles its CPU Adam on first use. tini: PID 1, which forwards signals and reaps orphans.
# Debian's packages are not pinned: its archive keeps only the newest version, so a pin breaks with the next update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ tini \
    && rm -rf /var/lib/apt/lists/*

# Dependencies change seldom and come first, in their own layer.
WORKDIR /opt/toolkit
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY docker docker
RUN --mount=type=secret,id=pip,target=/etc/pip.conf docker/install.sh

COPY conf conf
COPY hydra_plugins hydra_plugins
COPY toolkit toolkit
COPY launch launch
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation --root-user-action=ignore -e . \
    && python -m compileall -q toolkit launch hydra_plugins

# Not root, and numeric, so that Kubernetes can verify it. Some bases already have a user 1000.
RUN (getent passwd 1000 || true) | cut -d: -f1 | xargs -r userdel --remove \
    && useradd --create-home --uid 1000 --user-group trainer \
    && install -d -o 1000 -g 1000 /workspace
USER 1000:1000
WORKDIR /workspace
ENV PYTHONUNBUFFERED=1

LABEL org.opencontainers.image.title="deepspeed-megatron-toolkit" \
      org.opencontainers.image.description="One run description, DeepSpeed or Megatron-core, any layout" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
HEALTHCHECK --interval=30s --timeout=15s --start-period=120s --retries=3 CMD ["python", "-m", "toolkit.cluster.jobs.health"]
ENTRYPOINT ["tini", "--", "python", "/opt/toolkit/launch/train.py"]
CMD ["--help"]
