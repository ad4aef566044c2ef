import errno
import os
import socket
import tempfile
from pathlib import Path

import pytest

from quire.addresses import (
    AddressError,
    AddressInUse,
    AddressUnusable,
    HostPort,
    at_port,
    check_free,
    is_address,
    private_socket,
    with_port,
)


def test_port_0_becomes_a_free_port() -> None:
    address = with_port("127.0.0.1:0")
    parsed = HostPort.parse(address)
    assert parsed.host == "127.0.0.1"
    assert parsed.port > 0
    with socket.create_server((parsed.host, parsed.port)):
        pass


def test_reserved_addresses_are_not_chosen() -> None:
    """A process has 16 ports of its own, and a fleet reserves three for each replica before anyone listens there."""
    reserved: set[str] = set()
    for _ in range(100):
        address = with_port("127.0.0.1:0", reserved)
        assert address not in reserved
        reserved.add(address)


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=f"{address}.*in use"):
            with_port(address)
    assert with_port(address) == address


def test_ipv6_hosts_are_in_brackets() -> None:
    assert HostPort.parse("[::1]:80") == HostPort("::1", 80)
    assert str(HostPort("::1", 80)) == "[::1]:80"


def test_unix_paths_are_unchanged() -> None:
    assert with_port("unix:/run/x.sock") == "unix:/run/x.sock"


def test_at_port_replaces_the_port() -> None:
    assert at_port("127.0.0.1:0", 7) == "127.0.0.1:7"
    assert at_port("[::1]:0", 7) == "[::1]:7"
    assert at_port("unix:/run/x.sock", 1) == "unix:/run/x.sock"


def test_socket_files(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    check_free(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(path)
        taken.listen()
        with pytest.raises(AddressInUse, match=f"{path}.*in use"):
            check_free(f"unix:{path}")
    check_free(f"unix:{path}")


def test_socket_files_replace_no_other_files(tmp_path: Path) -> None:
    """A directory in place of a socket file was noticed only after a model was loaded, as an address in use."""
    file = tmp_path / "file"
    file.touch()
    for path in (tmp_path, file, file / "socket"):
        with pytest.raises(AddressUnusable, match=f"cannot listen on unix:{path}: .*(no socket|Not a directory)"):
            check_free(f"unix:{path}")


@pytest.mark.parametrize("address", ["192.0.2.1:0", "no-such-host.invalid:80", "a..b:1", f"unix:/{'x' * 200}"])
def test_addresses_where_no_server_can_listen(address: str) -> None:
    with pytest.raises(AddressUnusable, match=f"cannot listen on {address}"):
        check_free(address)


@pytest.mark.parametrize("address", ["", "localhost", ":80", "host:", "host:x", "host:70000", "host:-1", "host:²"])
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(AddressError):
        HostPort.parse(address)


@pytest.mark.parametrize("address", ["::1:9000", "fe80::1%lo:9000", "[::1:9000", "::1]:9000"])
def test_hosts_with_colons_need_a_pair_of_brackets(address: str) -> None:
    """Services failed only after they had loaded a model, because gRPC takes ::1:9000 for another host."""
    with pytest.raises(AddressError, match="needs brackets"):
        HostPort.parse(address)
    assert not is_address(address)


def test_the_private_directory_is_the_same_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", None)  # as in a process that has just started
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "open", full)
    assert private_socket("x") == f"unix:{tmp_path}/quire-{os.getuid()}/x.sock"
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nothing"))
    assert private_socket("x") == f"unix:/tmp/quire-{os.getuid()}/x.sock"


@pytest.mark.parametrize("name", ["per%20cent", "a,b", "a?b", "a#b", "x" * 100])
def test_a_temporary_directory_that_grpc_cannot_use_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / name
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    with pytest.raises(AddressUnusable, match="set TMPDIR to another directory than") as error:
        check_free(private_socket("executor"))
    assert str(directory) in str(error.value)
    monkeypatch.delenv("TMPDIR")
    with pytest.raises(AddressUnusable) as error:
        check_free(f"unix:{directory}/executor.sock")
    assert "TMPDIR" not in str(error.value)
