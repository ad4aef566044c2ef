"""Lets ranks of other machines join a group: both ends prove that they know the same secret.

    rank 0 (executor)                        the other rank
    ├── nonce of 32 bytes ───────────────────►
    ◄── nonce of 32 bytes, proof of the rank ─┤      a proof is the HMAC-SHA-256 of role, version and both nonces
    ├── proof of rank 0 ─────────────────────►       under the secret
    ├── SETUP, and the frames of the channel ►

The secret itself is never sent. Nothing is encrypted afterwards, neither the frames nor the sums of gloo: the network
between the machines has to be private, as for the collectives of GPUs.
"""

import hashlib
import hmac
import logging
import secrets
import socket
import threading
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

from executor.errors import ConfigError
from executor.parallel.channel import Channel
from quire.addresses import AddressUnusable, HostPort, listen_error
from quire.log_rate import RateLimit
from quire.version import build_version

_log = logging.getLogger(__name__)
_log.addFilter(RateLimit("a connection is no rank", per_second=1))

MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 4096
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size

HANDSHAKE_S = 5.0
"""Time for all reads and writes of a handshake, at either end."""

MAX_HANDSHAKES = 64
"""Most connections that prove it at a time. Others wait in the backlog."""

_BACKLOG = 128

_RETRY_S = 0.1
"""Time until the next connection is accepted after this process had no descriptor for one."""

_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}
"""A machine that vanishes is noticed after 11 seconds."""


class NotARank(Exception):
    """The other end does not know the secret, is another version, or does not answer in time."""


def read_key(path: str) -> bytes:
    """Returns the secret of a file, without white space at its ends. Raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            key = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"ranks_key: cannot read {path}: {error.strerror}") from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ConfigError(f"ranks_key: {path} must hold {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, and has {len(key)}")
    return key


class RankListener:
    """Listens for ranks of other machines. Used by rank 0 until the group is complete, then closed."""

    def __init__(self, address: str, key: bytes) -> None:
        """Raises AddressInUse, AddressUnusable, and ConfigError for all addresses of this machine: gloo needs one."""
        self._key = key
        self._joined: SimpleQueue[Channel] = SimpleQueue()
        self._free = threading.Semaphore(MAX_HANDSHAKES)
        self._listener = _listen(address)
        self.address = str(HostPort(*self._listener.getsockname()[:2]))
        self.host: str = self._listener.getsockname()[0]
        if ip_address(self.host.partition("%")[0]).is_unspecified:  # written in any way, such as "0"
            self._listener.close()
            raise ConfigError("ranks_listen: must be the address at which other machines reach this one")
        threading.Thread(target=self._accept, name="ranks that join", daemon=True).start()

    def next(self, timeout_s: float) -> Channel | None:
        """Returns the channel to the next rank that has joined, or None after a time."""
        try:
            return self._joined.get(timeout=timeout_s)
        except Empty:
            return None

    def close(self) -> None:
        """Refuses more ranks, and leaves those that `next` has not returned."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._drop()

    def _drop(self) -> None:
        while (channel := self.next(0.0)) is not None:
            channel.close()

    def _accept(self) -> None:
        while True:
            self._free.acquire()
            try:
                connection, peer = self._listener.accept()
            except OSError:  # closed, or out of descriptors
                if self._is_closed:
                    return
                self._free.release()
                time.sleep(_RETRY_S)
                continue
            try:
                threading.Thread(target=self._greet, args=(connection, peer[0]), daemon=True).start()
            except RuntimeError:  # this process may start no more threads now
                connection.close()
                self._free.release()

    def _greet(self, connection: socket.socket, host: str) -> None:
        try:
            greet(connection, self._key)
        except (NotARank, OSError) as error:
            _log.warning("a connection is no rank", extra={"client": host, "problem": str(error)})
            connection.close()
        else:
            self._joined.put(Channel(connection))
            if self._is_closed:
                self._drop()
        finally:
            self._free.release()

    @property
    def _is_closed(self) -> bool:
        return self._listener.fileno() < 0


def greet(connection: socket.socket, key: bytes) -> None:
    """Lets the other end prove that it is a rank, and proves that this one is the executor. Raises NotARank, OSError.

    OSError: this machine cannot make the connection one that lasts.
    """
    with _Handshake(connection) as handshake:
        own = secrets.token_bytes(_NONCE_BYTES)
        handshake.write(own)
        answer = handshake.read(_NONCE_BYTES + _PROOF_BYTES)
        nonces = own + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(key, "rank", nonces)):
            raise NotARank("it has another secret, or another version")
        handshake.write(_proof(key, "executor", nonces))


def join(address: str, key: bytes, timeout_s: float = HANDSHAKE_S) -> socket.socket:
    """Returns a connection to the executor at an address. Raises OSError if there is none, and NotARank."""
    wanted = HostPort.parse(address)
    connection = socket.create_connection((wanted.host, wanted.port), timeout=timeout_s)
    try:
        with _Handshake(connection) as handshake:
            theirs = handshake.read(_NONCE_BYTES)
            own = secrets.token_bytes(_NONCE_BYTES)
            handshake.write(own + _proof(key, "rank", theirs + own))
            answer = handshake.read(_PROOF_BYTES)
            if not hmac.compare_digest(answer, _proof(key, "executor", theirs + own)):
                raise NotARank("it has another secret, or another version")
    except BaseException:
        connection.close()
        raise
    return connection


class _Handshake:
    """The reads and writes of one handshake, which share one deadline. Afterwards the connection is one that lasts."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._ends_s = time.monotonic() + HANDSHAKE_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):  # a time-out is one
            raise NotARank(f"it does not answer: {error}") from None
        if error is None:
            self._connection.settimeout(None)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    self._connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def read(self, size: int) -> bytes:
        """Returns so many bytes. Raises NotARank and OSError, which includes TimeoutError after the deadline."""
        data = b""
        while len(data) < size:
            self._limit_next_call()
            part = self._connection.recv(size - len(data))
            if not part:
                raise NotARank("it has closed the connection, as one with another secret or version does")
            data += part
        return data

    def write(self, data: bytes) -> None:
        """Sends all bytes. Raises OSError, which includes TimeoutError after the deadline."""
        self._limit_next_call()
        self._connection.sendall(data)

    def _limit_next_call(self) -> None:
        """Limits the next call to the time left: a limit holds for one call only, which may return a single byte."""
        if (left_s := self._ends_s - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left_s)


def _proof(key: bytes, role: str, nonces: bytes) -> bytes:
    return hmac.digest(key, f"quire {build_version()} {role} ".encode() + nonces, "sha256")


def _listen(address: str) -> socket.socket:
    wanted = HostPort.parse(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(wanted.host, wanted.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except UnicodeError:  # of a name that cannot be written for the name service, such as "a..b"
        raise AddressUnusable(f"cannot listen on {address}: this cannot be the name of a host") from None
    except OSError as error:
        raise listen_error(address, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise listen_error(address, error) from None
    return listener
