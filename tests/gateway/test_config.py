"""The gateway's settings."""

from typing import Any

import pytest

from gateway.config import GatewayConfig
from quire.settings import ConfigError


@pytest.mark.parametrize(
    "wrong",
    [
        {"scheduler": ""},
        {"scheduler": "nowhere"},
        {"scheduler": "a:1,a:1"},
        {"scheduler": "a:1", "schedulers_file": "schedulers"},
        {"schedulers_file": 7},
        {"listen": "unix:/tmp/x"},
        {"grpc_listen": "unix:"},
        {"scheduler": "unix:"},
        {"listen": "8000"},
        {"max_body_bytes": 2**22},
        {"max_body_bytes": 0},
        {"max_requests": -1},
        {"max_connections": 1.5},
        {"resume_timeout_s": float("inf")},
        {"tls_certificate": "a.pem"},
        {"tls_client_ca": "a.pem"},
        {"scheduler_tls_key": "a.pem"},
        {"log_level": "loud"},
        {"log_format": "xml"},
        {"allow_anonymous": "yes"},
        {"live_page": "javascript:alert(1)"},
        {"live_page": "127.0.0.1:8080"},
        {"live_page": "http://[x"},
        {"live_page": "http://a:0"},
        {"nothing": 1},
    ],
)
def test_a_wrong_value_is_an_error_that_names_its_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GatewayConfig.from_dict(wrong)


def test_lists_of_names() -> None:
    config = GatewayConfig(scheduler="a:1, unix:/tmp/s", served_model_name="x,y", allowed_hosts="chat.example")
    assert config.schedulers == ["a:1", "unix:/tmp/s"]
    assert config.model_names == ["x", "y"]
    assert config.hosts == ["chat.example"]
    assert [connection.address for connection in config.connections("key")] == config.schedulers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unix:/my files/a.sock,unix:/my files/b.sock", ["unix:/my files/a.sock", "unix:/my files/b.sock"]),
        ("unix:/my files/a.sock b:1 [::1]:2", ["unix:/my files/a.sock", "b:1", "[::1]:2"]),
        ("a:1,, b:2,", ["a:1", "b:2"]),
        ("\na:1\nunix:/b.sock\t\n", ["a:1", "unix:/b.sock"]),  # as a file or a ConfigMap ends
    ],
)
def test_addresses_of_schedulers_can_be_paths_with_spaces(text: str, expected: list[str]) -> None:
    assert GatewayConfig(scheduler=text).schedulers == expected


def test_callers_must_be_known_where_other_machines_can_call() -> None:
    assert not GatewayConfig().must_know_callers
    assert GatewayConfig(listen="0.0.0.0:8000").must_know_callers
    assert not GatewayConfig(listen="0.0.0.0:8000", allow_anonymous=True).must_know_callers


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match="api_key"):
        GatewayConfig().connections("ü")
