"""Only a connection that knows the secret becomes a rank, and the other end proves that it knows it, too."""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import threading
import time
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from executor.errors import ConfigError
from executor.parallel import joining
from executor.parallel.channel import Channel, ChannelClosed, FrameKind
from executor.parallel.joining import NotARank, RankListener, join, read_key
from quire.addresses import AddressInUse, AddressUnusable
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = secrets.token_bytes(32)
_WAIT_S = 30.0


@pytest.fixture
def listener() -> Iterator[RankListener]:
    with closing(RankListener("127.0.0.1:0", KEY)) as listener:
        yield listener


def connected(listener: RankListener) -> socket.socket:
    host, port = listener.address.split(":")
    return socket.create_connection((host, int(port)), timeout=_WAIT_S)


def joined_at_last(address: str) -> socket.socket:
    """Tries as often as `quire rank` does."""
    while True:
        try:
            return join(address, KEY)
        except NotARank:
            time.sleep(0.05)


def is_closed(connection: socket.socket) -> bool:
    """Returns whether the other end closes the connection, after what it has sent."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_rank_joins_and_receives_frames(listener: RankListener) -> None:
    with join(listener.address, KEY) as connection:
        channel = listener.next(_WAIT_S)
        assert channel is not None
        channel.send_values(FrameKind.SETUP, {"rank": 1})
        assert Channel(connection).expect(FrameKind.SETUP) == b'{"rank": 1}'
        assert channel.peer == f"127.0.0.1:{connection.getsockname()[1]}"
        assert channel.host == "127.0.0.1"
        assert connection.gettimeout() is None, "a rank waits for launches without a limit"


def test_another_secret_does_not_join(listener: RankListener, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(NotARank):
        join(listener.address, secrets.token_bytes(32))
    assert listener.next(0.1) is None
    assert "a connection is no rank" in caplog.text


def test_another_version_does_not_join(listener: RankListener, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connected(listener)  # its nonce comes from the version of the executor
    monkeypatch.setattr(joining, "build_version", lambda: "another")
    nonce = connection.recv(32)
    proof = joining._proof(KEY, "rank", nonce + bytes(32))
    monkeypatch.undo()
    connection.sendall(bytes(32) + proof)
    assert is_closed(connection)
    assert listener.next(0.1) is None


@pytest.mark.parametrize("role", ["executor", "none"])
def test_no_proof_can_be_used_again(role: str, listener: RankListener) -> None:
    """Neither the proof of the other role, nor one that was made for other nonces."""
    first, second = connected(listener), connected(listener)
    nonce, other = first.recv(32), second.recv(32)
    proof = joining._proof(KEY, "rank" if role == "none" else role, (other if role == "none" else nonce) + bytes(32))
    first.sendall(bytes(32) + proof)
    assert is_closed(first)
    assert listener.next(0.1) is None
    second.close()


def test_an_executor_that_does_not_know_the_secret_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(64)
                connection.sendall(bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(NotARank, match="another secret"):
            join(f"127.0.0.1:{server.getsockname()[1]}", KEY)
        thread.join()


def test_silent_connections_do_not_keep_ranks_out(listener: RankListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "HANDSHAKE_S", 0.2)
    silent = [connected(listener) for _ in range(joining.MAX_HANDSHAKES * 3 // 2)]
    with joined_at_last(listener.address):
        assert listener.next(_WAIT_S) is not None
    assert all(is_closed(connection) for connection in silent)


def test_connections_that_send_a_byte_now_and_then_do_not_keep_ranks_out(
    listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "HANDSHAKE_S", 0.5)
    with connected(listener) as connection:
        connection.recv(32)
        connection.settimeout(0.1)
        for _ in range(63):  # one byte fewer than an answer has
            try:
                connection.sendall(b"x")
                assert connection.recv(1) == b"", "nothing more is sent before the proof"
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            break
        else:
            pytest.fail("the connection was kept for as long as it sent a byte in each interval")


def test_ranks_join_after_descriptors_or_threads_were_short(
    listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = threading.Thread.start, iter([RuntimeError("can't start new thread")])

    def start_or_fail(thread: threading.Thread) -> None:
        for error in failures:
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    with pytest.raises(NotARank):
        join(listener.address, KEY)
    with join(listener.address, KEY):
        assert listener.next(_WAIT_S) is not None


def test_a_rank_does_not_wait_for_an_executor_that_sends_a_byte_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "HANDSHAKE_S", 0.5)
    num_sent = 0

    def drip(server: socket.socket) -> None:
        nonlocal num_sent
        connection, _ = server.accept()
        with connection, suppress(ConnectionError):
            for _ in range(31):  # one byte fewer than a nonce has
                connection.sendall(b"x")
                num_sent += 1
                time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        with pytest.raises(NotARank, match="does not answer"):
            join(f"127.0.0.1:{server.getsockname()[1]}", KEY)
        thread.join()
    assert num_sent < 31


def test_a_write_has_only_the_time_that_the_reads_have_left(
    listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay_s, limits_s = 0.5, []

    class Recorded(socket.socket):
        def recv(self, *arguments: int) -> bytes:
            time.sleep(delay_s)
            return super().recv(*arguments)

        def sendall(self, *arguments: Any) -> None:
            limits_s.append(self.gettimeout())
            super().sendall(*arguments)

    recorded = Recorded(fileno=connected(listener).detach())
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", lambda *_, **__: recorded)
        join(listener.address, KEY).close()
    assert len(limits_s) == 1
    assert limits_s[0] <= joining.HANDSHAKE_S - delay_s


def test_accepting_pauses_while_no_descriptor_is_left(listener: RankListener, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def accept(_: socket.socket) -> None:
        events.append("accept")
        raise OSError(errno.EMFILE, "Too many open files")

    def pause(_: float) -> None:
        events.append("pause")
        time.sleep(0.001)

    with monkeypatch.context() as patch:
        patch.setattr(joining, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
        patch.setattr(socket.socket, "accept", accept)
        # The listener may wait for this connection in the real `accept`, from which it has to return.
        host, port = listener.address.rsplit(":", 1)
        socket.create_connection((host, int(port))).close()
        wait_until(lambda: len(events) >= 6)
    assert events[:6] == ["accept", "pause"] * 3
    with join(listener.address, KEY):
        assert listener.next(_WAIT_S) is not None


def test_a_connection_that_fails_in_the_handshake_is_closed(
    listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")

    with monkeypatch.context() as patch:
        patch.setattr(joining, "greet", fail)
        assert is_closed(connected(listener))
    with join(listener.address, KEY):
        assert listener.next(_WAIT_S) is not None


def test_garbage_is_refused(listener: RankListener) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 9, b"", bytes(1 << 20)):
        with connected(listener) as connection:
            try:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                continue
            assert is_closed(connection)
    assert listener.next(0.1) is None


def test_a_closed_listener_lets_no_rank_in() -> None:
    listener = RankListener("127.0.0.1:0", KEY)
    waiting = join(listener.address, KEY)
    time.sleep(0.05)
    listener.close()
    with pytest.raises(ChannelClosed):
        Channel(waiting).receive()
    with pytest.raises(ConnectionError):
        join(listener.address, KEY)
    wait_until(lambda: not any(thread.name == "ranks that join" for thread in threading.enumerate()))


def test_the_address_is_checked(listener: RankListener) -> None:
    with pytest.raises(AddressInUse):
        RankListener(listener.address, KEY)
    with pytest.raises(AddressUnusable):
        RankListener("192.0.2.1:7000", KEY)
    with pytest.raises(AddressUnusable):
        RankListener("no-such-host.invalid:7000", KEY)
    with pytest.raises(AddressUnusable, match=r"cannot listen on a\.\.b:7000: this cannot be the name of a host"):
        RankListener("a..b:7000", KEY)


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "[::]", "[0:0:0:0:0:0:0:0]"])
def test_all_addresses_of_a_machine_are_refused(host: str) -> None:
    """Ranks of other machines would be told this address, and would find themselves there."""
    with pytest.raises(ConfigError, match="ranks_listen: must be the address at which other machines reach this one"):
        RankListener(f"{host}:0", KEY)


@pytest.mark.parametrize(("text", "is_valid"), [(b"x" * 31, False), (b"x" * 32 + b"\n", True), (b"x" * 5000, False)])
def test_a_secret_has_enough_bytes(text: bytes, is_valid: bool, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(text)
    if is_valid:
        assert read_key(str(path)) == b"x" * 32
    else:
        with pytest.raises(ConfigError, match="ranks_key"):
            read_key(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        read_key(str(tmp_path / "missing"))
