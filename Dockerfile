# syntax=docker/dockerfile:1
# Two bases, one file:
#   docker build -t toolkit .                                                   CPU, every version from constraints.txt
#   docker build -t toolkit --build-arg BASE=nvcr.io/nvidia/pytorch:25.09-py3 --build-arg KEEP_TORCH=1 .   GPU, the image's own torch
#   docker run --rm -v "$PWD/runs:/workspace/runs" toolkit +exp=quickstart           the same overrides as launch/train.py
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG KEEP_TORCH=
ARG TORCH_INDEX=

# gcc and the Python headers: DeepSpeed builds its CPU Adam when it is first used. tini: signals and zombies as PID 1.
RUN apt-get update && apt-get install -y --no-install-recommends g++ tini && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/toolkit
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY toolkit/__init__.py toolkit/__init__.py
RUN if [ -n "$KEEP_TORCH" ]; then grep -vE '^(torch|numpy)==' constraints.txt > /tmp/constraints.txt; \
    else cp constraints.txt /tmp/constraints.txt; \
      pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} $(grep -E '^(torch|numpy)==' constraints.txt); fi \
    && DS_BUILD_OPS=0 pip install --no-cache-dir -c /tmp/constraints.txt -e '.[megatron]'
COPY conf conf
COPY toolkit toolkit
COPY launch launch

RUN useradd --create-home --uid 1000 trainer && mkdir /workspace && chown trainer /workspace
USER trainer
WORKDIR /workspace
ENTRYPOINT ["tini", "-g", "--", "python", "/opt/toolkit/launch/train.py"]
CMD ["--help"]
