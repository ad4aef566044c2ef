import socket

import pytest

from quire.addresses import AddressError, AddressInUse, HostPort, with_port


def test_port_0_becomes_a_free_port() -> None:
    address = with_port("127.0.0.1:0")
    parsed = HostPort.parse(address)
    assert parsed.host == "127.0.0.1"
    assert parsed.port > 0
    with socket.create_server((parsed.host, parsed.port)):
        pass


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=f"{address}.*in use"):
            with_port(address)
    assert with_port(address) == address


def test_ipv6_hosts_are_in_brackets() -> None:
    assert HostPort.parse("[::1]:80") == HostPort("::1", 80)
    assert str(HostPort("::1", 80)) == "[::1]:80"


def test_unix_paths_stay_as_they_are() -> None:
    assert with_port("unix:/run/x.sock") == "unix:/run/x.sock"


@pytest.mark.parametrize("address", ["", "localhost", ":80", "host:", "host:x", "host:70000", "host:-1", "host:²"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(AddressError):
        HostPort.parse(address)
