"""One configuration, complete and checked."""

from typing import Any

import pytest

from quire.addresses import HostPort
from scheduler.config import ConfigError, SchedulerConfig


def test_defaults_listen_to_this_machine_only() -> None:
    config = SchedulerConfig.from_dict({"model": "m"})
    assert HostPort.parse(config.listen).host == HostPort.parse(config.http_listen).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "model must be given"),
        ({"model": ""}, "model must be given"),
        ({"model": "m", "modle": 1, "a": 2}, "unknown keys: a, modle"),
        ({"model": 5}, "model must be str"),
        ({"model": "m", "policy": "lifo"}, "policy must be one of"),
        ({"model": "m", "batching": "orca"}, "batching must be one of continuous, static, dynamic"),
        ({"model": "m", "batch_timeout_s": 0}, "batch_timeout_s must be positive"),
        ({"model": "m", "memory": "buddy"}, "memory must be one of paged, contiguous"),
        ({"model": "m", "log_level": "loud"}, "log_level must be one of"),
        ({"model": "m", "log_format": "xml"}, "log_format must be one of"),
        ({"model": "m", "otlp_endpoint": "localhost:4318"}, "otlp_endpoint must be http"),
        ({"model": "m", "otlp_endpoint": "http://"}, "otlp_endpoint must be http"),
        ({"model": "m", "otlp_endpoint": "http://a:99999"}, "otlp_endpoint must be http"),
        ({"model": "m", "max_in_flight": 0}, "max_in_flight must be positive"),
        ({"model": "m", "max_num_seqs": "8"}, "max_num_seqs must be int or absent"),
        ({"model": "m", "max_streams": True}, "max_streams must be int"),
        ({"model": "m", "drain_timeout_s": float("nan")}, "drain_timeout_s must be positive"),
        ({"model": "m", "drain_timeout_s": float("inf")}, "drain_timeout_s must be positive"),
        ({"model": "m", "enable_prefix_caching": 1}, "enable_prefix_caching must be bool"),
        ({"model": "m", "http_listen": "8080"}, "http_listen must be host:port"),
        ({"model": "m", "http_listen": "localhost:99999"}, "http_listen must be host:port"),
        ({"model": "m", "listen": "nonsense"}, "listen must be host:port or unix:path"),
    ],
)
def test_nonsense_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SchedulerConfig.from_dict(values)


def test_whole_numbers_are_numbers() -> None:
    assert SchedulerConfig.from_dict({"model": "m", "drain_timeout_s": 5, "max_num_seqs": None}).drain_timeout_s == 5


def test_every_field_is_documented() -> None:
    for name in SchedulerConfig.__dataclass_fields__:
        assert f"    {name} " in (SchedulerConfig.__doc__ or ""), name


def test_addresses() -> None:
    SchedulerConfig(model="m", listen="unix:/tmp/x", http_listen="[::1]:80")
