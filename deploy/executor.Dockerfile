# The executor. The target `cpu` runs on the CPU and contains compiled kernels; the target `gpu` is for NVIDIA devices.
# BASE_IMAGE needs Python 3.11 or newer with venv and pip.
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# Every file that is installed has to have a hash that is in a lock. Dependencies come first because they change less
# often than the code.
FROM ${BASE_IMAGE} AS dependencies
# Package indexes, if not pip's defaults. An index of CPU builds of torch saves the target `cpu` some gigabytes.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
RUN python3 -m venv /opt/quire
COPY deploy/locks locks
RUN /opt/quire/bin/pip install --no-cache-dir --require-hashes --requirement locks/executor.txt

FROM dependencies AS wheel
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
 && build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir dist .

FROM dependencies AS cpu-packages
RUN /opt/quire/bin/pip install --no-cache-dir --require-hashes --requirement locks/torch-cpu.txt \
 || /opt/quire/bin/pip install --no-cache-dir --require-hashes --requirement locks/torch-cuda.txt
COPY --from=wheel /src/dist dist
RUN /opt/quire/bin/pip install --no-cache-dir --no-deps dist/*.whl && /opt/quire/bin/pip check \
 && /opt/quire/bin/pip uninstall --yes --quiet pip

FROM ${BASE_IMAGE} AS runtime
# A new volume takes owner and mode of the directory in the image. /run/quire holds the socket file of the executor.
RUN mkdir -p /cache/hub /cache/kernels && install -d -m 700 /run/quire && chown -R 10001:10001 /cache /run/quire
COPY deploy/health_check.py /opt/quire/health_check.py
ENV PATH=/opt/quire/bin:$PATH HOME=/cache HF_HOME=/cache/hub PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GRPC_VERBOSITY=ERROR \
    NUMBA_CACHE_DIR=/cache/kernels TRITON_CACHE_DIR=/cache/kernels/triton
USER 10001:10001
EXPOSE 9102
ENTRYPOINT ["quire", "executor"]

FROM runtime AS kernels
COPY --from=cpu-packages /opt/quire /opt/quire
COPY deploy/warm_kernels.py /tmp/warm_kernels.py
RUN python /tmp/warm_kernels.py

FROM runtime AS cpu
COPY --from=cpu-packages /opt/quire /opt/quire
COPY --from=kernels --chown=10001:10001 /cache/kernels /cache/kernels

# It comes after the target `cpu`, because builders without BuildKit build all stages before the target.
FROM dependencies AS gpu-packages
RUN /opt/quire/bin/pip install --no-cache-dir --require-hashes --requirement locks/torch-cuda.txt
COPY --from=wheel /src/dist dist
RUN /opt/quire/bin/pip install --no-cache-dir --no-deps dist/*.whl && /opt/quire/bin/pip check \
 && /opt/quire/bin/pip uninstall --yes --quiet pip

# Triton needs a C compiler at run time: it compiles its launchers for the device it finds.
FROM runtime AS gpu
USER 0
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=gpu-packages /opt/quire /opt/quire
USER 10001:10001
