"""Checks the health of a service in a container: the exit code is 0 if it serves.

python health_check.py [ADDRESS] [--alive URL] [--kill-after N]

ADDRESS is that of its gRPC server, HOST:PORT or unix:PATH. grpc.health.v1 follows the progress of the service, so a
service that hangs does not serve. A container engine restarts a container that ends, but not one that is merely
unhealthy. So after N failed checks in a row this check kills a service that has served before: it kills the processes
that the container's init has started, which ends the container.

With --alive, a check fails only if that URL does not answer with status 200 either: a scheduler does not serve while
its executor is away, and must not be killed for that. Without ADDRESS, the URL alone is checked. If it begins with
https, the TLS handshake is the answer.
"""

import argparse
import os
import signal
import socket
import ssl
import sys
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
STATE = Path("/tmp/quire-health")  # /tmp is emptied when the container restarts
"""File with the number of failed checks in a row. It does not exist until the service has served."""

_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_serving(address: str) -> bool:
    """Returns true if the service at this gRPC address reports that it serves."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def is_alive(url: str) -> bool:
    """Returns true if the URL answers with status 200, or, if it begins with https, ends a TLS handshake."""
    address = urllib.parse.urlsplit(url)
    try:
        if address.scheme == "https":
            return _ends_handshake(address.hostname or "", address.port or 443)
        with _WITHOUT_PROXY.open(url, timeout=TIMEOUT_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _ends_handshake(host: str, port: int) -> bool:
    """Raises OSError if the handshake fails.

    The service's event loop takes part in it. A request could follow only with a certificate, where clients need one.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as plain, context.wrap_socket(plain):
        return True


def num_failures(is_well: bool) -> int:
    """Records the result of this check; returns the number of failed checks in a row, including this one."""
    if not is_well and not STATE.exists():
        return 0
    number = 0 if is_well else _last_number() + 1
    temporary = STATE.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_text(str(number))
        temporary.replace(STATE)
    except OSError:  # the disk is full: this check is not counted, and its result still stands
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return number


def _last_number() -> int:
    """Returns the number of failures that the file says; 0 if it says nothing, as after a write to a full disk."""
    try:
        return int(STATE.read_text())
    except (OSError, ValueError):
        return 0


def kill_service() -> None:
    """Kills all processes that the container's init has started; init then ends as well."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has ended
            continue
        if parent == 1:
            os.kill(int(stat.parent.name), signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address", nargs="?")
    parser.add_argument("--alive")
    parser.add_argument("--kill-after", type=int)
    arguments = parser.parse_args()
    if arguments.address is None and arguments.alive is None:
        parser.error("ADDRESS or --alive must be given")
    serves = is_alive(arguments.alive) if arguments.address is None else is_serving(arguments.address)
    if arguments.kill_after:
        is_well = serves or (arguments.alive is not None and is_alive(arguments.alive))
        if num_failures(is_well) >= arguments.kill_after:
            print("the service has served before and no longer answers: killed", file=sys.stderr)
            kill_service()
    return 0 if serves else 1


if __name__ == "__main__":
    sys.exit(main())
