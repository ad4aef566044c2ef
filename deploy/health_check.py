"""Asks a service how it is: exit code 0 where it serves. For the health checks of containers.

python health_check.py HOST:PORT [--alive URL] [--kill-after N]

HOST:PORT is that of its gRPC server: grpc.health.v1 follows progress, and what hangs does not serve. An engine restarts
a container that ends, and never one that is merely unhealthy. So after N failed checks in a row this one ends a service
that has served before: what the container's init has started is killed, and the container ends with it.

With --alive only a failure to answer there (with 200) counts towards N: a scheduler does not serve while its executor
is away, and must not be killed for that.
"""

import argparse
import os
import signal
import sys
import urllib.request
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
STATE = Path("/tmp/quire-health")  # a file system of this container's life alone
"""The number of failed checks in a row. Not there: it has never served."""


def is_serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def is_alive(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def num_failures(is_well: bool) -> int:
    """In a row, this check included."""
    if is_well or STATE.exists():
        STATE.write_text(str(0 if is_well else int(STATE.read_text()) + 1))
        return int(STATE.read_text())
    return 0


def kill_service() -> None:
    """All that the container's first process has started, which then ends too."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        if parent == 1:
            os.kill(int(stat.parent.name), signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--alive")
    parser.add_argument("--kill-after", type=int)
    arguments = parser.parse_args()
    serves = is_serving(arguments.address)
    if arguments.kill_after:
        is_well = serves or (arguments.alive is not None and is_alive(arguments.alive))
        if num_failures(is_well) >= arguments.kill_after:
            print("it has served, and does not even answer now: killed", file=sys.stderr)
            kill_service()
    return 0 if serves else 1


if __name__ == "__main__":
    sys.exit(main())
