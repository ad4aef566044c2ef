"""The services as processes: their configurations from one command line, and the commands that run them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from executor.config import ExecutorConfig
from executor.parallel.rank_config import RankConfig
from gateway.config import GatewayConfig
from quire.addresses import (
    AddressError,
    AddressInUse,
    AddressUnusable,
    check_apart,
    default_admin_address,
    private_socket,
    with_port,
)
from quire.cli.child import ChildSpec
from quire.cli.config_flags import arguments
from quire.command import API_KEY, quire_command
from quire.garbage import without_collections
from quire.settings import ConfigError
from scheduler.config import SchedulerConfig

# The scheduler connects to the address at which the executor listens, so one flag sets both.
EXECUTOR_ADDRESS = ("executor", "listen_address")
# `quire serve` has no flags for these: all services run on one machine as one user and meet at socket files.
EXECUTOR_HOP = {"tls_certificate", "tls_key", "tls_client_ca", "scheduler_name"}
SCHEDULER_HOP = {"executor_tls_ca", "executor_tls_certificate", "executor_tls_key", "executor_name", "takeover"}
GATEWAY_HOP = {"local_listen", "move_streams"}

GATEWAY_OWN = (
    *("served_model_name", "tool_format", "max_body_bytes", "max_connections", "max_requests"),
    *("max_waiting", "max_wait_s", "resume_timeout_s"),
)
"""Settings of the gateway that the other services do not have."""
WITH_GATEWAY = ("gateway_listen", *GATEWAY_OWN)
"""Flags that have no meaning without the gateway."""

# Fields of the gateway that have the same meaning for the scheduler, so that one flag sets both.
_GATEWAY_SHARED = (
    *("allow_anonymous", "tls_certificate", "tls_key", "tls_client_ca"),
    *("stalled_reader_timeout_s", "drain_timeout_s", "log_level", "log_format"),
)
_STOP_MARGIN_S = 15.0


@dataclass(frozen=True, slots=True)
class ServicePair:
    """The checked configurations of both services and of the gateway before them, with every port chosen.

    gateway  None: there is none
    suffix   end of the names of both services, if there are several pairs
    """

    scheduler: SchedulerConfig
    executor: ExecutorConfig
    scheduler_values: dict[str, Any]
    executor_values: dict[str, Any]
    gateway: GatewayConfig | None = None
    gateway_values: dict[str, Any] = field(default_factory=dict)
    suffix: str = ""

    def children(self) -> list[ChildSpec]:
        """Returns the services in the order in which they end: each needs the next one to drain."""
        gateway = [] if self.gateway is None else [gateway_child(self.gateway, self.gateway_values)]
        scheduler_grace_s = self.scheduler.drain_timeout_s + _STOP_MARGIN_S
        return [
            *gateway,
            _child("scheduler", self.scheduler_values, scheduler_grace_s, self.suffix),
            _child("executor", self.executor_values, _STOP_MARGIN_S, self.suffix),
        ]

    @property
    def replicas(self) -> tuple["ServicePair", ...]:
        """All pairs of services: this one."""
        return (self,)

    @property
    def admin_address(self) -> str:
        """The address of the scheduler's admin service."""
        return self.scheduler.admin_listen or default_admin_address(self.scheduler.listen)

    def ready_line(self) -> str:
        return (
            f"ready grpc={self.scheduler.listen} http={self.scheduler.http_listen} "
            f"executor={self.executor.listen_address} metrics={self.executor.metrics_address or 'off'}"
            + (f" openai={self.gateway.listen}" if self.gateway is not None else "")
        )


def service_pair(values: Mapping[str, Any]) -> ServicePair:
    """Passes each value of one command line to the services that have a field of that name.

    Port 0 becomes a free port here, so that a restarted service keeps its address. Raises ConfigError, and AddressInUse
    if another server listens at an address.
    """
    for_scheduler = {name: value for name, value in values.items() if name in _names(SchedulerConfig)}
    for_executor = {name: value for name, value in values.items() if name in _names(ExecutorConfig) - EXECUTOR_HOP}
    for name in ("listen", "http_listen"):
        for_scheduler[name] = chosen_address(name, for_scheduler.get(name, default_of(SchedulerConfig, name)))
    # Two pairs of services on one machine listen at two addresses, and so have different socket files.
    name = for_scheduler["listen"].rpartition(":")[2].replace("/", "-")
    for_scheduler["executor"] = chosen_address(
        "executor", for_scheduler.get("executor", private_socket(f"executor-{name}"))
    )
    # A server at the same port of another host has the same socket files, and would answer in place of this one.
    admin = for_scheduler.get("admin_listen")
    chosen_admin = chosen_address("admin_listen", admin or default_admin_address(for_scheduler["listen"]))
    if admin:
        for_scheduler["admin_listen"] = chosen_admin
    metrics_address = for_executor.get("metrics_address", default_of(ExecutorConfig, "metrics_address"))
    for_executor["metrics_address"] = chosen_address("metrics_address", metrics_address) if metrics_address else ""
    for_executor[EXECUTOR_ADDRESS[1]] = for_scheduler[EXECUTOR_ADDRESS[0]]
    has_gateway = values.get("gateway", True)
    if has_gateway:
        for_scheduler["local_listen"] = private_socket(f"gateway-{name}")
    scheduler, executor = SchedulerConfig.from_dict(for_scheduler), ExecutorConfig.from_dict(for_executor)
    chosen = {name: for_scheduler[name] for name in ("listen", "http_listen", "executor")}
    chosen |= {"admin_listen": chosen_admin, "metrics_address": for_executor["metrics_address"]}
    for_gateway = gateway_values(values, scheduler) if has_gateway else {}
    check_all_apart(chosen | {"gateway_listen": for_gateway.get("listen", "")})
    if not has_gateway:
        for name in WITH_GATEWAY:
            if name in values:
                raise ConfigError(f"{name} is a setting of the gateway, which is left out")
        return ServicePair(scheduler, executor, for_scheduler, for_executor)
    return ServicePair(
        scheduler, executor, for_scheduler, for_executor, GatewayConfig.from_dict(for_gateway), for_gateway
    )


def gateway_values(values: Mapping[str, Any], scheduler: SchedulerConfig) -> dict[str, Any]:
    """Returns the values of the gateway before a scheduler. It calls the scheduler at a socket file, without a key."""
    listen = values.get("gateway_listen", default_of(GatewayConfig, "listen"))
    scheme = "http" if scheduler.tls_certificate is None else "https"
    return {name: values[name] for name in (*GATEWAY_OWN, *_GATEWAY_SHARED) if name in values} | {
        "scheduler": scheduler.local_listen,
        "listen": chosen_address("gateway_listen", listen),
        "allowed_hosts": scheduler.http_allowed_hosts,
        "live_page": f"{scheme}://{scheduler.http_listen}",
    }


def on_free_ports(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with free ports and no gateway by default, for services that run as long as one command."""
    ports = dict.fromkeys(("listen", "http_listen", "metrics_address"), "127.0.0.1:0")
    return ports | {"gateway": False} | dict(values)


def chosen_address(name: str, address: str) -> str:
    """Returns the address of a flag, with a free port in place of port 0. Raises ConfigError and AddressInUse."""
    try:
        return with_port(address)
    except (AddressError, AddressUnusable) as error:
        raise ConfigError(f"{name}: {error}") from None
    except AddressInUse as error:
        raise AddressInUse(f"{name}: {error}") from None


def check_all_apart(addresses: Mapping[str, str]) -> None:
    """Raises ConfigError if two services would listen at the same address. Keys are flags; an empty address is none."""
    try:
        check_apart({flag: address for flag, address in addresses.items() if address})
    except AddressUnusable as error:
        raise ConfigError(str(error)) from None


def run_scheduler(config: SchedulerConfig) -> int:
    """Runs the scheduler in this process until it is told to end; returns the exit code."""
    from scheduler.main import run

    return run(config)


def run_executor(config: ExecutorConfig) -> int:
    """Runs the executor in this process until it is told to end; returns the exit code."""
    with without_collections():
        from executor.main import run

    return run(config)


def run_ranks(config: RankConfig) -> int:
    """Keeps ranks of an executor on another machine until it is told to end; returns the exit code."""
    from executor.parallel.rank_host import run

    return run(config)


def run_gateway(config: GatewayConfig) -> int:
    """Runs the gateway in this process until it is told to end; returns the exit code."""
    from gateway.main import run

    return run(config, os.environ.get(API_KEY) or None)


def gateway_child(config: GatewayConfig, values: Mapping[str, Any]) -> ChildSpec:
    """Returns the process of a gateway. A key in the environment is that of a client, perhaps for another server."""
    return _child("gateway", values, config.drain_timeout_s + _STOP_MARGIN_S, without=(API_KEY,))


def _child(
    service: str, values: Mapping[str, Any], grace_s: float, suffix: str = "", without: tuple[str, ...] = ()
) -> ChildSpec:
    return ChildSpec(service + suffix, (*quire_command(), service, *arguments(values)), grace_s, without)


def _names(config: type[Any]) -> set[str]:
    return {field.name for field in fields(config)}


def default_of(config: type[Any], name: str) -> Any:
    """Returns the default of a setting."""
    return next(field.default for field in fields(config) if field.name == name)
