"""The settings of a fleet from one command line, checked by the parsers and configurations of the services."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from executor.config import ExecutorConfig
from fleet.parts import Role
from fleet.settings import FleetSettings
from gateway.config import GatewayConfig
from quire.cli.config_flags import given
from quire.cli.service_flags import with_model, with_schedulers
from quire.model_path import resolved_model
from quire.settings import ConfigError
from scheduler.config import SchedulerConfig

FLEET_FLAGS = {
    Role.EXECUTOR: ("model", "tensor_parallel_size", "listen_address", "metrics_address"),
    Role.SCHEDULER: ("model", "listen", "http_listen", "admin_listen", "local_listen", "executor", "takeover"),
    Role.GATEWAY: ("listen", "scheduler", "schedulers_file"),
}
"""Flags of the services that the fleet sets itself."""

# The class of click, or of the click that is part of typer.
_USAGE_ERROR: type[Exception] = typer.BadParameter.mro()[1]

_ANYWHERE = "fleet.invalid:1"
"""Stands for an address that other machines reach, while flags are checked."""


def fleet_settings(commands: Any, values: Mapping[str, Any]) -> FleetSettings:
    """Returns the settings. Raises ConfigError, which names the flag, if a service would refuse its own.

    commands  the command line as a group of click, with the commands of the services
    values    fields of FleetSettings; flags of services as one text each
    """
    values = given(values) | {"model": resolved_model(values.get("model"))}
    for role in Role:
        name = f"{role}_flags"
        try:
            values[name] = tuple(shlex.split(values.get(name, "")))
        except ValueError as error:
            raise ConfigError(f"--{role}-flags: {error}") from None
    try:
        settings = FleetSettings(**values)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for role in Role:
        _check(commands, settings, role)
    return settings


def _check(commands: Any, settings: FleetSettings, role: Role) -> None:
    """Lets the configuration of a service check its flags, with addresses like those that it will get."""
    words = settings.flags(role)
    own = _parsed(commands, role, getattr(settings, f"{role}_flags"))
    if taken := next((name for name in FLEET_FLAGS[role] if name in own), None):
        raise ConfigError(f"--{role}-flags: the fleet itself sets --{taken.replace('_', '-')}")
    values = _parsed(commands, role, words)
    is_local = settings.backend == "local"
    address = "127.0.0.1:1" if is_local else _ANYWHERE
    try:
        match role:
            case Role.EXECUTOR:
                ExecutorConfig.from_dict(with_model(values) | {"listen_address": address})
            case Role.SCHEDULER:
                SchedulerConfig.from_dict(with_model(values) | {"listen": address})
            case Role.GATEWAY:
                GatewayConfig.from_dict(with_schedulers(values) | {"listen": _gateway_listen(settings.gateway_listen)})
    except ConfigError as error:
        raise ConfigError(f"--{role}-flags: {error}") from None


def _gateway_listen(listen: str) -> str:
    return f"{_ANYWHERE.rpartition(':')[0]}{listen}" if listen.startswith(":") else listen


def _parsed(commands: Any, role: Role, words: Sequence[str]) -> dict[str, Any]:
    """Returns the flags that the parser of a service finds. Raises ConfigError."""
    if "--help" in words:
        raise ConfigError(f"--{role}-flags: --help starts no service")
    try:
        context = commands.commands[str(role)].make_context(f"quire {role}", list(words))
    except _USAGE_ERROR as error:
        raise ConfigError(f"--{role}-flags: {getattr(error, 'message', error)}") from None
    return {name: value for name, value in given(context.params).items() if value != ()}
