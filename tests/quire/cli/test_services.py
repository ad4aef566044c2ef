"""The addresses of the services of one command line."""

import socket
from pathlib import Path
from typing import Any

import pytest

from quire.addresses import UNIX, AddressInUse, with_port
from quire.cli.services import ServicePair, on_free_ports, service_pair
from quire.settings import ConfigError


def pair(**values: Any) -> ServicePair:
    return service_pair(on_free_ports({"model": str(Path(__file__).parent), **values}))


@pytest.mark.parametrize(("name", "field"), [("executor", "executor"), ("admin", "admin_listen")])
def test_a_server_at_the_same_port_of_another_host_is_refused(
    name: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    address = with_port("127.0.0.1:0")
    addresses = {"executor": pair(listen=address).executor.listen_address, "admin": pair(listen=address).admin_address}
    path = Path(addresses[name].removeprefix(UNIX))
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(AddressInUse, match=f"^{field}: cannot listen on .*{name}"):
            pair(listen=address)
    assert pair(listen=address)  # the file of a server that has ended


def test_port_0_of_the_admin_address_becomes_a_free_port() -> None:
    chosen = pair(admin_listen="127.0.0.1:0")
    assert not chosen.admin_address.endswith(":0")
    assert chosen.scheduler_values["admin_listen"] == chosen.admin_address


@pytest.mark.parametrize("values", [{"gateway_listen": "127.0.0.1:0"}, {"max_requests": 5}])
def test_settings_of_a_gateway_that_is_left_out_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(values))} is a setting of the gateway, which is left out"):
        pair(**values)
    assert pair(gateway=True, **values).gateway is not None


@pytest.mark.parametrize(
    ("flag", "other"),
    [
        ("listen", "http_listen"),
        ("http_listen", "gateway_listen"),
        ("listen", "metrics_address"),
        ("admin_listen", "executor"),
    ],
)
@pytest.mark.parametrize("is_any_host", [False, True])
def test_two_services_at_one_address_are_refused_at_once(
    flag: str, other: str, is_any_host: bool, tmp_path: Path
) -> None:
    """The second one would find it out when the model is loaded."""
    address = f"unix:{tmp_path}/socket" if flag == "admin_listen" else with_port("127.0.0.1:0")
    same = address.replace("127.0.0.1", "0.0.0.0") if is_any_host else address
    given = {"gateway_listen": "127.0.0.1:0", "executor": f"unix:{tmp_path}/executor", flag: address, other: same}
    with pytest.raises(ConfigError, match="two services cannot listen on"):
        pair(gateway=True, allow_anonymous=True, **given)
