# The executor. The target `cpu` runs on the CPU and contains compiled kernels; the target `gpu` is for NVIDIA devices.
# BASE_IMAGE needs Python 3.11 or newer with venv and pip.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# Package indexes, if not pip's defaults. An index of CPU builds of torch saves some gigabytes.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
RUN python3 -m venv /opt/quire
COPY constraints.txt ./
COPY deploy/locks locks
# Dependencies come first because they change less often than the code. Every file has to have a hash that is in the
# lock. torch has none there: its builds for CPUs and for CUDA come from different indexes.
RUN /opt/quire/bin/pip install --no-cache-dir --require-hashes --requirement locks/executor.txt \
 && /opt/quire/bin/pip install --no-cache-dir --constraint constraints.txt torch
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY protos protos
COPY scheduler scheduler
COPY executor executor
COPY gateway gateway
COPY fleet fleet
COPY kernels kernels
COPY quire quire
COPY planning planning
COPY bench bench
COPY models/tiny models/tiny
RUN python3 -m venv /src/build && build/bin/pip install --no-cache-dir --require-hashes --requirement locks/build.txt \
 && build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir dist . \
 && /opt/quire/bin/pip install --no-cache-dir --no-deps dist/*.whl \
 && /opt/quire/bin/pip uninstall --yes --quiet pip

FROM ${BASE_IMAGE} AS runtime
# A new volume takes owner and mode of the directory in the image. /run/quire holds the socket file of the executor.
RUN mkdir -p /cache/hub /cache/kernels && install -d -m 700 /run/quire && chown -R 10001:10001 /cache /run/quire
COPY --from=build /opt/quire /opt/quire
COPY deploy/health_check.py /opt/quire/health_check.py
ENV PATH=/opt/quire/bin:$PATH HOME=/cache HF_HOME=/cache/hub PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/cache/kernels TRITON_CACHE_DIR=/cache/kernels/triton
USER 10001:10001
EXPOSE 9102
ENTRYPOINT ["quire", "executor"]

FROM runtime AS kernels
COPY deploy/warm_kernels.py /tmp/warm_kernels.py
RUN python /tmp/warm_kernels.py

FROM runtime AS cpu
COPY --from=kernels --chown=10001:10001 /cache/kernels /cache/kernels

# Triton needs a C compiler at run time: it compiles its launchers for the device it finds.
FROM runtime AS gpu
USER 0
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 10001:10001
