# The scheduler: the packages that `pip install quire` installs, without torch.
# BASE_IMAGE needs Python 3.11 or newer with venv and pip.
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${BASE_IMAGE} AS build
# Package indexes, if not pip's defaults.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
RUN python3 -m venv /opt/quire
COPY deploy/locks locks
# Dependencies come first because they change less often than the code. Every file has to have a hash that is in the lock.
RUN /opt/quire/bin/pip install --no-cache-dir --require-hashes --requirement locks/scheduler.txt
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
# numpy's wheel contains 19 MB of its own tests.
RUN python3 -m venv /src/build && build/bin/pip install --no-cache-dir --require-hashes --requirement locks/build.txt \
 && build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir dist . \
 && /opt/quire/bin/pip install --no-cache-dir --no-deps dist/*.whl \
 && /opt/quire/bin/pip uninstall --yes --quiet pip setuptools \
 && find /opt/quire/lib/python3*/site-packages/numpy -type d -name tests -prune -exec rm -r {} +

FROM ${BASE_IMAGE}
# A new volume takes owner and mode of the directory in the image. /run/quire holds the socket file of the executor.
RUN mkdir -p /cache/hub && install -d -m 700 /run/quire && chown -R 10001:10001 /cache /run/quire
COPY --from=build /opt/quire /opt/quire
COPY deploy/health_check.py /opt/quire/health_check.py
ENV PATH=/opt/quire/bin:$PATH HOME=/cache HF_HOME=/cache/hub PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GRPC_VERBOSITY=ERROR
USER 10001:10001
EXPOSE 50051 8080
ENTRYPOINT ["quire", "scheduler"]
