"""Tests that the configuration is complete and checked."""

from dataclasses import fields, replace
from typing import Any

import pytest

from quire.addresses import HostPort
from quire.settings import ConfigError
from scheduler.config import SchedulerConfig
from scheduler.core import Request, SchedulerLimits, SequenceParams, StepCosts, StepResult
from scheduler.core.baselines.batching import ClosedBatch
from scheduler.engine.model_description import ModelDescription
from scheduler.engine.options import EngineOptions, from_fields
from tests.support.scheduler.fake_client import DESCRIPTION


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
        (
            {"model": "m", "target_inter_token_latency_ms": float("nan")},
            "target_inter_token_latency_ms must be positive",
        ),
        (
            {"model": "m", "target_inter_token_latency_ms": float("inf")},
            "target_inter_token_latency_ms must be positive",
        ),
        ({"model": "m", "target_inter_token_latency_ms": 0}, "target_inter_token_latency_ms must be positive"),
        (
            {"model": "m", "target_inter_token_latency_ms": "25"},
            "latency_ms must be float or absent",
        ),
        ({"model": "m", "target_inter_token_latency_ms": 1e-9}, "from 1 to 6000, not 1e-09: a step without decodes"),
        ({"model": "m", "target_inter_token_latency_ms": 1e9}, "from 1 to 6000, not 1e.09"),
        ({"model": "m", "target_inter_token_latency_ms": 600, "step_timeout_s": 5.0}, "from 1 to 500, not 600"),
        ({"model": "m", "enable_prefix_caching": 1}, "enable_prefix_caching must be bool"),
        ({"model": "m", "http_listen": "8080"}, "http_listen must be host:port"),
        ({"model": "m", "http_listen": "localhost:99999"}, "http_listen must be host:port"),
        ({"model": "m", "listen": "nonsense"}, "listen must be host:port or unix:path"),
        ({"model": "m", "listen": "unix:"}, "listen must be host:port or unix:path"),
        ({"model": "m", "http_listen": "unix:/tmp/x"}, "http_listen must be host:port"),
        ({"model": "m", "local_listen": "unix:"}, "local_listen must be unix:path"),
        ({"model": "m", "executor": ""}, "executor must be host:port, unix:path or file:path"),
        ({"model": "m", "executor": "nonsense"}, "executor must be host:port, unix:path or file:path"),
        ({"model": "m", "admin_listen": "nonsense"}, "admin_listen must be host:port or unix:path"),
        ({"model": "m", "listen": "0.0.0.0:1"}, "listen 0.0.0.0:1 can be reached.*quire keys add.*--api-keys"),
        ({"model": "m", "listen": "[::]:1"}, "listen .* can be reached"),
        ({"model": "m", "listen": "10.0.0.1:1"}, "listen .* can be reached"),
        ({"model": "m", "listen": "some-host:1"}, "listen .* can be reached"),
        ({"model": "m", "http_listen": "0.0.0.0:1"}, "http_listen .* can be reached.*quire keys add.*--api-keys"),
        ({"model": "m", "admin_listen": "0.0.0.0:1"}, "admin_listen .* can be reached.*quire keys add.*--api-keys"),
        ({"model": "m", "admin_listen": "0.0.0.0:1", "allow_anonymous": True}, "admin_listen .* can be reached"),
        ({"model": "m", "tls_certificate": "c"}, "tls_certificate and tls_key"),
        ({"model": "m", "tls_key": "k"}, "tls_certificate and tls_key"),
        ({"model": "m", "tls_client_ca": "c"}, "tls_client_ca needs"),
        ({"model": "m", "jwt_keys": "k", "jwt_issuer": "i"}, "jwt_keys needs jwt_issuer and jwt_audience"),
        ({"model": "m", "jwt_keys": "k", "jwt_audience": "i"}, "jwt_keys needs jwt_issuer and jwt_audience"),
        (
            {"model": "m", "jwt_keys": "http://a/b", "jwt_issuer": "i", "jwt_audience": "a"},
            "jwt_keys must be a file or an https URL",
        ),
        ({"model": "m", "jwt_algorithms": "none"}, "jwt_algorithms must be some of"),
        ({"model": "m", "jwt_algorithms": "RS256,HS256"}, "jwt_algorithms must be some of"),
        ({"model": "m", "jwt_algorithms": ""}, "jwt_algorithms must be some of"),
    ],
)
def test_a_bad_value_is_an_error_that_names_its_field(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SchedulerConfig.from_dict(values)


@pytest.mark.parametrize(
    "values",
    [
        {"listen": "unix:/tmp/x", "http_listen": "[::1]:80", "admin_listen": "unix:/tmp/y"},
        {"listen": "localhost:1", "http_listen": "127.0.0.2:80", "admin_listen": "127.0.0.1:2"},
        {"listen": "0.0.0.0:1", "http_listen": "0.0.0.0:2", "admin_listen": "0.0.0.0:3", "api_keys": "keys.json"},
        {"listen": "0.0.0.0:1", "jwt_keys": "https://i/k", "jwt_issuer": "i", "jwt_audience": "a"},
        {"listen": "0.0.0.0:1", "http_listen": "0.0.0.0:2", "allow_anonymous": True},
    ],
)
def test_other_machines_can_call_only_where_that_is_wanted(values: dict[str, Any]) -> None:
    SchedulerConfig.from_dict({"model": "m"} | values)


def test_an_int_is_accepted_as_a_float() -> None:
    assert SchedulerConfig.from_dict({"model": "m", "drain_timeout_s": 5, "max_num_seqs": None}).drain_timeout_s == 5


def test_the_engine_and_the_core_take_the_settings_over_by_name() -> None:
    options = from_fields(EngineOptions, SchedulerConfig(model="m", max_num_seqs=5, max_waiting_requests=7))
    assert (options.max_num_seqs, options.max_waiting_requests) == (5, 7)
    model = ModelDescription("m", "float32", "cpu", 50, 100, 4, 20, max_num_seqs=3, max_num_batched_tokens=64)
    core = options.new_core(model)
    assert (
        core.state.limits.max_num_seqs,
        core.state.limits.max_model_len,
        core.state.limits.max_waiting_requests,
    ) == (3, 100, 7)


def test_defaults_of_the_limits_are_those_of_the_core() -> None:
    limits = {field.name: field.default for field in fields(SchedulerLimits)}
    settings = {field.name: field.default for field in fields(SchedulerConfig)}
    for name in ("max_in_flight", "max_waiting_requests", "max_waiting_prompt_tokens"):
        assert settings[name] == limits[name], name


@pytest.mark.parametrize(
    ("device", "target_ms", "expected_s"),
    [("cpu", None, 0.1), ("cuda", None, 0.025), ("cuda:1", None, 0.025), ("cuda:1", 40.0, 0.04), ("cpu", 40, 0.04)],
)
def test_the_target_of_a_step_depends_on_the_device(device: str, target_ms: float | None, expected_s: float) -> None:
    options = from_fields(EngineOptions, SchedulerConfig(model="m", target_inter_token_latency_ms=target_ms))
    core = options.new_core(ModelDescription("m", "float32", device, 50, 100, 4, 20, 3, 64))
    assert core.state.limits.target_inter_token_latency_s == expected_s


@pytest.mark.parametrize(("max_num_batched_tokens", "expected"), [(None, 64), (16, 16), (1, 1), (4096, 64)])
def test_the_target_and_the_bound_of_tokens_hold_together(max_num_batched_tokens: int | None, expected: int) -> None:
    """Costs that are small, or not known, leave the bound of the operator and of the executor."""
    config = SchedulerConfig(
        model="m", target_inter_token_latency_ms=1.0, max_num_batched_tokens=max_num_batched_tokens, max_in_flight=1
    )
    options = from_fields(EngineOptions, config)
    model = options.narrowed(replace(DESCRIPTION, device="cpu"))
    core = options.new_core(model)
    core.executor_attached(1, model.num_blocks + 1)
    core.add(Request(1, [7] * 100, SequenceParams(max_total_tokens=101)))
    for costs, num_tokens in ((StepCosts(), expected), (StepCosts(token_s=1e-3), min(expected, 10))):
        core.set_costs(costs)
        plan = core.schedule()
        assert plan is not None
        assert plan.num_tokens == num_tokens
        core.commit(StepResult(1, plan.step_id, [0] * len(core.state.in_flight[-1].sampled)))


@pytest.mark.parametrize(("batching", "timeout_s"), [("continuous", 0.0), ("static", 0.0), ("dynamic", 0.2)])
def test_only_dynamic_batching_has_the_batch_timeout(batching: str, timeout_s: float) -> None:
    options = from_fields(EngineOptions, SchedulerConfig(model="m", batching=batching, batch_timeout_s=0.2))
    core = options.new_core(ModelDescription("m", "float32", "cpu", 50, 100, 4, 20, 3, 64))
    queue = core.state.admission_queue
    assert isinstance(queue, ClosedBatch) == (batching != "continuous")
    assert getattr(queue, "timeout_s", 0.0) == timeout_s


def test_every_field_is_documented() -> None:
    for name in SchedulerConfig.__dataclass_fields__:
        assert f"    {name} " in (SchedulerConfig.__doc__ or ""), name


def test_ipv6_and_unix_addresses_are_accepted() -> None:
    SchedulerConfig(model="m", listen="unix:/tmp/x", http_listen="[::1]:80")
