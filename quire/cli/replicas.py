"""Several replicas on one machine: schedulers with an executor each, and one gateway before them.

The gateway takes the addresses that clients know, `--listen` and `--gateway-listen`. Each replica listens at socket
files, and at ports of its own for its pages: the port of the flag and those after it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from executor.config import ExecutorConfig
from gateway.config import GatewayConfig
from quire.addresses import UNIX, HostPort, private_socket
from quire.channel import DEFAULT_ADDRESS
from quire.cli.child import ChildSpec
from quire.cli.services import (
    WITH_GATEWAY,
    ServicePair,
    check_all_apart,
    chosen_address,
    default_of,
    gateway_child,
    gateway_values,
    service_pair,
)
from quire.settings import ConfigError
from scheduler.config import SchedulerConfig

MAX_REPLICAS = 64
_SOCKET = ".sock"
_GPUS = Path("/proc/driver/nvidia/gpus")

_ADDRESSES: dict[str, str | None] = {
    "http_listen": default_of(SchedulerConfig, "http_listen"),
    "admin_listen": None,
    "metrics_address": default_of(ExecutorConfig, "metrics_address"),
}
"""Addresses of which each replica has its own, with their defaults. None: the service has a default for each."""

_OF_ROUTING = ("routing", "model", "revision", "chat_template_arguments")
"""Settings with which the gateway chooses among replicas."""

# The share of an executor's free memory and the most bytes that it takes for its pool on a CPU, where no flag says so.
_POOL_SHARE, _POOL_BYTES = 0.4, 2 * 2**30


@dataclass(frozen=True, slots=True)
class ReplicatedServices:
    """The checked configurations of all replicas and of the gateway before them, with every port chosen."""

    replicas: tuple[ServicePair, ...]
    gateway: GatewayConfig
    gateway_values: dict[str, Any]

    def children(self) -> list[ChildSpec]:
        """Returns the services in the order in which they end: each needs the next ones to drain."""
        in_order = zip(*(pair.children() for pair in self.replicas), strict=True)
        return [gateway_child(self.gateway, self.gateway_values), *(each for kind in in_order for each in kind)]

    def ready_line(self) -> str:
        """Returns the line with all addresses; those of replicas are in the order of their numbers."""
        addresses = {
            "grpc": [self.gateway.grpc_listen or ""],
            "http": [pair.scheduler.http_listen for pair in self.replicas],
            "executor": [pair.executor.listen_address for pair in self.replicas],
            "metrics": [pair.executor.metrics_address or "off" for pair in self.replicas],
            "openai": [self.gateway.listen],
        }
        return " ".join(["ready", *(f"{name}={','.join(listed)}" for name, listed in addresses.items())])


def replicated_services(values: Mapping[str, Any], num_replicas: int) -> ReplicatedServices:
    """Returns the services of one command line with --replicas.

    Raises ConfigError, and AddressInUse if another server listens at an address.
    """
    if not values.get("gateway", True):
        raise ConfigError("replicas need the gateway, which clients call: leave out --no-gateway")
    if num_replicas > MAX_REPLICAS:
        raise ConfigError(f"replicas must be at most {MAX_REPLICAS}, not {num_replicas}")
    listen = chosen_address("listen", values.get("listen", DEFAULT_ADDRESS))
    # Two groups of replicas on one machine listen at two addresses, and so have different socket files.
    name = listen.rpartition(":")[2].replace("/", "-")
    shares = _shares(values, num_replicas)
    pairs = tuple(_replica({**values, **shares}, name, i) for i in range(num_replicas))
    _check_distinct([address for pair in pairs for address in _pages(pair)])
    for_gateway = gateway_values(values, pairs[0].scheduler) | {
        "scheduler": ",".join(pair.scheduler.local_listen or "" for pair in pairs),
        "grpc_listen": listen,
    }
    for_gateway |= {name: values[name] for name in _OF_ROUTING if name in values}
    pages = {f"page {i}": page for i, page in enumerate(each for pair in pairs for each in _pages(pair))}
    check_all_apart({**pages, "listen": listen, "gateway_listen": for_gateway["listen"]})
    return ReplicatedServices(pairs, GatewayConfig.from_dict(for_gateway), for_gateway)


def _replica(values: Mapping[str, Any], name: str, number: int) -> ServicePair:
    defaults = _ADDRESSES | {"executor": private_socket(f"executor-{name}")}
    given = {flag: values.get(flag, default) for flag, default in defaults.items()}
    own: dict[str, Any] = {flag: _of_replica(address, number) for flag, address in given.items() if address}
    if values.get("device") == "cuda":
        own["device"] = f"cuda:{number}"
    own["move_streams"] = True
    own["listen"] = private_socket(f"scheduler-{name}-{number}")
    own["local_listen"] = private_socket(f"gateway-{name}-{number}")
    of_pair = {flag: value for flag, value in values.items() if flag not in WITH_GATEWAY}
    return replace(service_pair({**of_pair, **own, "gateway": False}), suffix=f"-{number}")


def _pages(pair: ServicePair) -> list[str]:
    return [each for each in (pair.scheduler.http_listen, pair.executor.metrics_address) if each]


def _check_distinct(addresses: list[str]) -> None:
    """Raises ConfigError if two replicas would listen at one address, as they would if port 0 finds too few ports."""
    shared = sorted({address for address in addresses if addresses.count(address) > 1})
    if shared:
        raise ConfigError(
            f"replicas would share {', '.join(shared)}: each takes the port after that of the one before it, so give "
            "--http-listen and --metrics-address ports that are further apart, and not 0 for many replicas"
        )


def _of_replica(address: str, number: int) -> str:
    """Returns a path with the number at its end, or the port as many after the given one. Port 0 stays."""
    if address.startswith(UNIX):
        path, dot, ending = address.rpartition(_SOCKET)
        return f"{path}-{number}{dot}" if dot and not ending else f"{address}-{number}"
    try:
        target = HostPort.parse(address)
    except ValueError:
        return address  # the service says what is wrong with it
    return str(HostPort(target.host, target.port + number)) if target.port else address


def _shares(values: Mapping[str, Any], num_replicas: int) -> dict[str, Any]:
    """Returns what each executor gets of this machine, where no flag says it. Raises ConfigError for too few GPUs."""
    device, num_gpus = values.get("device", "auto"), _num_gpus()
    if device.startswith("cuda:"):
        raise ConfigError(f"device {device} is one GPU, and each replica needs its own: give --device cuda")
    if device != "cpu" and num_gpus:
        if num_gpus < num_replicas:
            raise ConfigError(f"replicas need a GPU each: {num_gpus} are here, for {num_replicas} replicas")
        return {"device": "cuda"}
    shares: dict[str, Any] = {}
    if "num_threads" not in values:
        num_cores = len(os.sched_getaffinity(0))
        shares["num_threads"] = max(1, (num_cores - 1 if num_cores > 2 else num_cores) // num_replicas)
    is_sized = "num_blocks" in values or "memory_fraction" in values
    if not is_sized and _free_bytes() * _POOL_SHARE < num_replicas * _POOL_BYTES:
        shares["memory_fraction"] = _POOL_SHARE / num_replicas
    return shares


def _num_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0


def _free_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
