"""Flags generated from configuration classes."""

import asyncio
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import quire.cli.main
from executor.config import ExecutorConfig
from gateway.config import GatewayConfig
from quire.cli import exit_codes
from quire.cli.config_flags import arguments, flag_parameters, given, with_flags
from quire.cli.option_flags import option_parameters
from quire.cli.services import EXECUTOR_HOP, GATEWAY_OWN, SCHEDULER_HOP, on_free_ports, service_pair
from quire.options import GenerateOptions, field_texts
from quire.settings import ConfigError
from scheduler.config import SchedulerConfig

CONFIGS = pytest.mark.parametrize("config", [SchedulerConfig, ExecutorConfig, GatewayConfig])
MODEL = str(Path(__file__).parent)


@dataclass(frozen=True)
class Toy:
    """A configuration.

    model    the name,
             in two lines
    amount   the quantity
    is_open  the state
    """

    model: str
    amount: float | None = None
    is_open: bool = True
    undocumented: int = 5


def parse(words: list[str]) -> dict[str, Any]:
    """Returns the values that a command with the flags of Toy receives."""
    seen: list[dict[str, Any]] = []
    app = typer.Typer()
    app.command()(with_flags(lambda **values: seen.append(values), flag_parameters(Toy)))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return given(seen[0])


def test_flags_that_are_not_given_are_left_out() -> None:
    assert parse([]) == {}


def test_arguments_are_the_inverse_of_parsing() -> None:
    values = {"model": "a b", "amount": 0.5, "is_open": False, "undocumented": 7}
    assert parse(arguments(values)) == values
    assert parse(arguments({"is_open": True})) == {"is_open": True}


def test_help_is_the_docstring_with_its_defaults() -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(with_flags(lambda **values: None, flag_parameters(Toy)))
    help_text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "the name, in two lines" in help_text
    assert "the state [default: True]" in help_text
    assert "the quantity --is-open" in help_text  # no default to show


def test_a_command_keeps_its_own_parameters() -> None:
    seen: list[dict[str, Any]] = []

    def command(own: int = 1, **values: Any) -> None:
        seen.append({"own": own, **values})

    app = typer.Typer()
    app.command()(with_flags(command, flag_parameters(Toy, leave_out={"undocumented"})))
    assert CliRunner().invoke(app, ["--own", "3", "--model", "m"]).exit_code == 0
    assert given(seen[0]) == {"own": 3, "model": "m"}


@CONFIGS
def test_every_field_of_the_services_has_a_text(config: type[Any]) -> None:
    assert set(field_texts(config)) == {field.name for field in fields(config)}


@pytest.mark.parametrize(
    ("command", "runner", "config"),
    [("scheduler", "run_scheduler", SchedulerConfig), ("executor", "run_executor", ExecutorConfig)],
)
def test_every_field_can_be_set_by_the_flag_of_its_name(
    monkeypatch: pytest.MonkeyPatch, command: str, runner: str, config: type[Any]
) -> None:
    seen: list[Any] = []

    def run(value: Any) -> int:
        seen.append(value)
        return 5

    monkeypatch.setattr(quire.cli.main, runner, run)
    values = {field.name: other_value(field.name, field.default) for field in fields(config)}
    result = CliRunner().invoke(quire.cli.main.app, [command, *arguments(values)])
    assert result.exit_code == 5, result.output
    assert seen == [config(**values | {"model": str(Path("models/tiny").resolve())})]
    for field in fields(config):
        assert getattr(seen[0], field.name) != field.default


def other_value(name: str, default: Any) -> Any:
    """Returns a valid value that differs from the default."""
    chosen = {
        "model": "models/tiny",
        "policy": "priority",
        "batching": "static",
        "memory": "contiguous",
        "log_level": "error",
        "log_format": "json",
        "otlp_endpoint": "http://127.0.0.1:4318",
        "dtype": "float32",
        "device": "cpu",
        "kernels": "reference",
        "load_format": "random",
        "memory_fraction": 0.5,
        "revision": "main",
        "model_name": "toy",
        "admin_listen": "127.0.0.1:7",
        "api_keys": "keys.json",
        "tenants": "tenants.toml",
        "jwt_keys": "jwks.json",
        "jwt_issuer": "issuer",
        "jwt_audience": "quire",
        "jwt_algorithms": "RS512",
        "tls_certificate": "server.pem",
        "tls_key": "server.key",
        "tls_client_ca": "clients.pem",
        "local_listen": "unix:/tmp/local.sock",
        "grpc_listen": "127.0.0.1:7",
        "routing": "ring",
        "ranks_key": "ranks.key",
        **dict.fromkeys(("executor", "listen_address", "ranks_listen"), "127.0.0.1:7"),
        **dict.fromkeys((*EXECUTOR_HOP, *SCHEDULER_HOP - {"takeover"}), "x"),
    }
    if name in chosen:
        return chosen[name]
    if isinstance(default, str):
        return "127.0.0.1:7"
    if isinstance(default, bool):
        return not default
    return 7 if default is None else default + 1


def test_one_command_line_configures_both_services() -> None:
    values = {"model": MODEL, "revision": "v2", "max_num_seqs": 3, "policy": "priority", "num_blocks": 40}
    pair = service_pair(on_free_ports(values))
    assert (pair.scheduler.model, pair.executor.model) == (MODEL, MODEL)
    assert (pair.scheduler.revision, pair.executor.revision) == ("v2", "v2")
    assert (pair.scheduler.max_num_seqs, pair.executor.max_num_seqs) == (3, 3)
    assert (pair.scheduler.policy, pair.executor.num_blocks) == ("priority", 40)
    assert pair.scheduler.executor == pair.executor.listen_address
    addresses = [
        pair.scheduler.listen,
        pair.scheduler.http_listen,
        pair.executor.listen_address,
        pair.executor.metrics_address,
    ]
    assert len(set(addresses)) == 4
    executor = addresses.pop(2)
    assert executor.startswith("unix:/")
    assert executor.endswith(f"/executor-{addresses[0].rpartition(':')[2]}.sock")
    assert all(address.startswith("127.0.0.1:") and not address.endswith(":0") for address in addresses)
    addresses.insert(2, executor)
    assert pair.ready_line() == "ready grpc={} http={} executor={} metrics={}".format(*addresses)


def test_the_executor_may_use_a_unix_socket_and_no_metrics() -> None:
    pair = service_pair(on_free_ports({"model": MODEL}) | {"executor": "unix:/tmp/x.sock", "metrics_address": ""})
    assert pair.scheduler.executor == pair.executor.listen_address == "unix:/tmp/x.sock"
    assert pair.ready_line().endswith("executor=unix:/tmp/x.sock metrics=off")


def test_children_get_the_values_as_flags_and_the_scheduler_ends_first() -> None:
    pair = service_pair(on_free_ports({"model": MODEL, "num_blocks": 40, "drain_timeout_s": 50.0}))
    scheduler, executor = pair.children()
    assert (scheduler.name, executor.name) == ("scheduler", "executor")
    assert scheduler.command[1:6] == ("-X", "faulthandler", "-m", "quire", "scheduler")
    assert "--num-blocks" in executor.command
    assert "--num-blocks" not in scheduler.command
    assert scheduler.grace_s > 50.0  # the scheduler has its whole time to drain


def test_children_import_the_package_of_their_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = service_pair(on_free_ports({"model": MODEL}))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "bin"), *sys.path])
    monkeypatch.chdir(tmp_path)
    assert pair.children()[0].command[:6] == (sys.executable, "-P", "-X", "faulthandler", "-m", "quire")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert pair.children()[0].command[:5] == (sys.executable, "-X", "faulthandler", "-m", "quire")


def test_every_option_of_a_request_has_a_text_and_a_flag() -> None:
    assert set(field_texts(GenerateOptions)) == set(GenerateOptions.__annotations__)
    assert {parameter.name for parameter in option_parameters()} == set(GenerateOptions.__annotations__) - {
        "request_id"
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"policy": "lottery"},
        {"listen": "nowhere"},
        {"max_in_flight": -1},
        {"dtype": "int3"},
    ],
)
def test_a_wrong_value_is_an_error_that_names_its_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        service_pair(on_free_ports({"model": MODEL}) | wrong)


def test_the_gateway_stands_before_the_scheduler_and_ends_first() -> None:
    values = {"model": MODEL, "gateway": True, "gateway_listen": "127.0.0.1:0", "drain_timeout_s": 50.0}
    pair = service_pair(on_free_ports(values))
    gateway, scheduler, executor = pair.children()
    assert (gateway.name, scheduler.name, executor.name) == ("gateway", "scheduler", "executor")
    assert gateway.grace_s > 50.0
    assert pair.gateway is not None
    assert pair.gateway.scheduler == pair.scheduler.local_listen
    assert pair.ready_line().endswith(f" openai={pair.gateway.listen}")
    assert not pair.gateway.listen.endswith(":0")


def test_two_gateways_of_one_user_call_two_schedulers() -> None:
    values = {"model": MODEL, "gateway": True, "gateway_listen": "127.0.0.1:0"}
    sockets = {service_pair(on_free_ports(values)).scheduler.local_listen for _ in range(2)}
    assert len(sockets) == 2
    assert service_pair(on_free_ports({"model": MODEL})).scheduler.local_listen is None


def test_settings_of_the_scheduler_hold_for_its_gateway() -> None:
    values = {"model": MODEL, "gateway": True, "gateway_listen": "127.0.0.1:0", "api_keys": "keys.json"}
    shared = {"tls_certificate": "c.pem", "tls_key": "k.pem", "tls_client_ca": "ca.pem", "allow_anonymous": True}
    plain = service_pair(on_free_ports(values))
    assert plain.gateway is not None
    assert plain.gateway.live_page == f"http://{plain.scheduler.http_listen}"
    pair = service_pair(on_free_ports(values) | shared | {"http_allowed_hosts": "quire.example.org"})
    assert pair.gateway is not None
    assert {name: getattr(pair.gateway, name) for name in shared} == shared
    assert pair.gateway.hosts == ["quire.example.org"]
    assert pair.gateway.live_page == f"https://{pair.scheduler.http_listen}"


def test_settings_of_the_gateway_alone_are_given_to_it() -> None:
    values = {"model": MODEL, "gateway": True, "gateway_listen": "127.0.0.1:0"}
    own = {
        "served_model_name": "small",
        "tool_format": "hermes",
        "max_body_bytes": 4096,
        "max_connections": 11,
        "max_requests": 12,
        "max_waiting": 13,
        "max_wait_s": 14.0,
        "resume_timeout_s": 15.0,
    }
    assert set(own) == set(GATEWAY_OWN)
    given = own | {"stalled_reader_timeout_s": 16.0}
    pair = service_pair(on_free_ports(values) | given)
    assert pair.gateway is not None
    assert {name: getattr(pair.gateway, name) for name in given} == given
    assert pair.scheduler.stalled_reader_timeout_s == 16.0
    for name, value in own.items():
        with pytest.raises(ConfigError, match=f"{name} is a setting of the gateway"):
            service_pair(on_free_ports({"model": MODEL}) | {name: value})


def test_the_gateway_gets_no_key_of_a_person() -> None:
    values = {"model": MODEL, "gateway": True, "gateway_listen": "127.0.0.1:0", "api_keys": "keys.json"}
    gateway, *others = service_pair(on_free_ports(values)).children()
    assert gateway.without == ("QUIRE_API_KEY",)
    assert {other.without for other in others} == {()}


def test_every_setting_of_the_gateway_has_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(quire.cli.main, "run_gateway", lambda config: seen.append(config) or 5)
    values: dict[str, Any] = {field.name: other_value(field.name, field.default) for field in fields(GatewayConfig)} | {
        "served_model_name": "a",
        "tool_format": "hermes",
        "live_page": "http://h",
        "scheduler_ca": "ca.pem",
        "scheduler_tls_certificate": "c",
        "scheduler_tls_key": "k",
    }
    del values["schedulers_file"]  # which replaces the addresses
    words = arguments({name: value for name, value in values.items() if name != "scheduler"})
    result = CliRunner().invoke(quire.cli.main.app, ["gateway", "--scheduler", "a:1", "--scheduler", "b:2", *words])
    assert result.exit_code == 5, result.output
    assert seen.pop() == (config := GatewayConfig(**values | {"scheduler": "a:1,b:2"}))
    for field in fields(GatewayConfig):
        assert getattr(config, field.name) != field.default or field.name == "schedulers_file"
    CliRunner().invoke(quire.cli.main.app, ["gateway", "--schedulers-file", "addresses"])
    assert seen == [GatewayConfig(schedulers_file="addresses")]
    CliRunner().invoke(quire.cli.main.app, ["gateway"])
    assert seen[1] == GatewayConfig()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["serve", "--frobnicate"], "--frobnicate"),
        (["scheduler", "--block-size=16"], "--block-size"),
        (["serve", "--max-in-flight=0"], "max_in_flight"),
        (["serve", "--policy=shortest"], "policy"),
        (["serve", "--dtype=float8"], "dtype"),
        (["serve", "--listen=nowhere"], "listen"),
    ],
)
def test_an_invalid_flag_is_reported(words: list[str], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "run", lambda _: pytest.fail("services were started"))
    result = CliRunner().invoke(quire.cli.main.app, words)
    assert result.exit_code == exit_codes.USAGE
    assert problem in result.stderr.splitlines()[-1]
