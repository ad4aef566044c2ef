"""Asks a part on this machine whether it is alive, and a scheduler whether it serves and what waits in it."""

import socket
import ssl
import time
from contextlib import suppress

import grpc

from fleet.parts import Load, Role
from quire.addresses import HostPort
from quire.channel import CHANNEL_OPTIONS
from quire.v1.generation_pb2 import SERVER_STATE_WAITING_FOR_EXECUTOR, GetServerInfoRequest
from quire.v1.generation_pb2_grpc import GenerationStub

TIMEOUT_S = 1.0

SILENT_S = {Role.EXECUTOR: 60.0, Role.SCHEDULER: 20.0, Role.GATEWAY: 20.0}
"""Time after which a part that was ready and does not answer hangs. Checks are counted, so that a machine that was
suspended kills nothing."""

# A thread beside the event loop answers it in executors and schedulers, and says whether the loop runs. The event loop
# of a gateway answers itself.
_PATH = "/healthz"


class Liveness:
    """Counts the checks of one incarnation that have failed in a row."""

    def __init__(self, role: Role, interval_s: float = TIMEOUT_S) -> None:
        self._max_failed = SILENT_S[role] / interval_s
        self._interval_s = interval_s
        self._num_failed = 0
        self._next_s = 0.0

    def is_hung(self, http: str) -> bool:
        """Checks at most once in an interval."""
        now_s = time.monotonic()
        if http and now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self._num_failed = 0 if answers(http) else self._num_failed + 1
        return self._num_failed >= self._max_failed


def answers(address: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Returns whether a server answers GET /healthz with 200 in time, or where it wants TLS, a handshake.

    A server that closes the connection is alive: it has as many connections as it may have.
    """
    try:
        target = HostPort.parse(address)
        with socket.create_connection((target.host, target.port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(f"GET {_PATH} HTTP/1.1\r\nHost: {target}\r\nConnection: close\r\n\r\n".encode())
            reply = connection.recv(64)
            if not reply or b" 200 " in reply:
                return True
        return _shakes_hands(target, timeout_s)
    except (BrokenPipeError, ConnectionResetError):
        return True
    except (OSError, ValueError):
        return False


def _shakes_hands(target: HostPort, timeout_s: float) -> bool:
    """A request could follow only with a certificate, where clients need one."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection((target.host, target.port), timeout_s) as connection:
        with context.wrap_socket(connection):
            return True


class LoadProbe:
    """Asks one scheduler at its local address, a socket file that needs no key."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)])
        self._stub = GenerationStub(self._channel)

    def load(self) -> Load | None:
        """Returns the load; None if the scheduler does not answer, or has had no executor yet."""
        with suppress(grpc.RpcError):
            state = self._stub.GetServerInfo(GetServerInfoRequest(), timeout=TIMEOUT_S)
            return Load(
                queued_tokens=state.num_waiting_prompt_tokens,
                oldest_s=state.oldest_waiting_s,
                computed_tokens=state.num_computed_prompt_tokens,
                num_requests=state.num_waiting + state.num_running,
                has_executor=state.state != SERVER_STATE_WAITING_FOR_EXECUTOR,
            )
        return None

    def close(self) -> None:
        self._channel.close()
