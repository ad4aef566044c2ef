"""Reaches the controller of a fleet on a Ray cluster, and starts one."""

import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from fleet.ray_backend import NAMESPACE
from fleet.ray_control import ControllerActor, controller_name
from fleet.settings import FleetSettings
from fleet.wanted import FleetError, Wanted, status_in
from quire.addresses import is_local
from quire.log_writer import put_line

_ANSWER_S = 10.0
_RESTART_S = 60.0
"""Time that the actor of a controller that has died gets to be there again."""


class RayClient:
    """Connects to the cluster when it is made; a process has one connection."""

    def __init__(self, name: str, address: str) -> None:
        """Raises FleetError if the cluster cannot be reached."""
        self._name = name
        if not ray.is_initialized():
            try:
                ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
            except (RayError, ConnectionError, ValueError, RuntimeError) as error:
                raise FleetError(f"the Ray cluster at {address} cannot be reached: {error}") from None

    def up(self, settings: FleetSettings, wanted: Wanted) -> bool:
        is_new = not self._has_parts()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._warn(nodes)
        settings = _with_gpus(settings, nodes)
        try:
            actor = (
                ray.remote(ControllerActor)
                .options(
                    name=controller_name(self._name),
                    namespace=NAMESPACE,
                    lifetime="detached",
                    num_cpus=0,
                    max_restarts=-1,
                    max_task_retries=-1,
                    max_concurrency=8,
                )
                .remote(settings, wanted)
            )
            ray.get(actor.call.remote("status", {}), timeout=_RESTART_S)
        except (RayError, GetTimeoutError) as error:
            raise FleetError(f"the controller cannot run in the cluster, is Quire installed there? {error}") from None
        except ValueError:
            raise FleetError(f"the fleet {self._name} is up: see quire fleet status, scale and down") from None
        return is_new

    def ask(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        until_s = time.monotonic() + _RESTART_S
        while True:
            try:
                actor = ray.get_actor(controller_name(self._name), NAMESPACE)
                answer = ray.get(actor.call.remote(verb, dict(arguments)), timeout=_ANSWER_S)
            except ValueError:
                raise FleetError(
                    f"there is no fleet {self._name} in this cluster: start one with quire fleet up"
                ) from None
            except (RayError, GetTimeoutError) as error:
                if time.monotonic() >= until_s:
                    raise FleetError(f"the controller does not answer: {error}") from None
                time.sleep(0.2)
                continue
            return status_in(answer)

    def until_down(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while self._has_parts():
            if time.monotonic() >= until_s:
                raise FleetError(f"not down after {timeout_s:g} s: see quire fleet status")
            time.sleep(0.2)

    def _has_parts(self) -> bool:
        """Returns whether an actor of the fleet is left."""
        return any(name.startswith(f"{self._name}/") for name in _names())

    def _warn(self, nodes: list[dict[str, Any]]) -> None:
        is_remote = any(not is_local(f"{node['NodeManagerAddress']}:0") for node in nodes)
        if is_remote and os.environ.get("RAY_AUTH_MODE") != "token":
            put_line(
                sys.stderr,
                "warning: everyone who reaches this Ray cluster can run programs on its nodes: set "
                "RAY_AUTH_MODE=token and a token on all of them, and here",
            )


def _names() -> set[str]:
    return {each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE}


def _with_gpus(settings: FleetSettings, nodes: list[dict[str, Any]]) -> FleetSettings:
    """Returns the settings with the GPUs of one executor. Raises FleetError if no node has as many."""
    most = max((node["Resources"].get("GPU", 0.0) for node in nodes), default=0.0)
    wanted = settings.num_gpus_of(most)
    if wanted > most:
        raise FleetError(f"an executor needs {wanted:g} GPUs, and no node of the cluster has more than {most:g}")
    return replace(settings, num_gpus=wanted or None)
