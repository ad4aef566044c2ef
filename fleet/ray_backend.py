"""The backend for a Ray cluster: every part is a detached actor in a placement group of its own.

Schedulers and executors are in different groups, so that the death of a node or of a gang takes no more with it than it
has to. Actors are never restarted by Ray: the controller starts new ones, which may be on other nodes.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fleet.backend import BackendError
from fleet.parts import Part, PartStatus, Role, State
from fleet.ray_holder import Holder
from fleet.settings import FleetSettings

NAMESPACE = "quire-fleet"
ANSWER_S = 2.0
"""Time that all actors together get to answer one look. An actor that takes longer answers the next one."""

SILENT_S = 30.0
"""Time after which an actor that has answered before and does not now hangs."""

_SHARE = 0.001  # of a custom resource: it chooses nodes, and counts nothing


class _Actor:
    """One actor, and its last answer."""

    def __init__(self, name: str, part: Part, handle: Any, started_s: float) -> None:
        self.name = name
        self.handle = handle
        self.asked: Any = None
        self.heard_s = time.monotonic()
        self.status = PartStatus(part, name, State.STARTING, started_s, machine="waits for a node")
        self.has_answered = False


class RayBackend:
    """Finds the actors of its fleet by their names. To be used within the cluster, in the namespace of fleets.

    check  is called before each action, and does not return if another controller has taken this one's place
    """

    def __init__(self, settings: FleetSettings, check: Callable[[], None]) -> None:
        self._settings = settings
        self._check = check
        self._prefix = f"{settings.name}/"
        self._actors: dict[str, _Actor] = {}
        self._gone: dict[Part, PartStatus] = {}
        self._tails: dict[Part, str] = {}

    def start(self, part: Part, peers: Sequence[str]) -> None:
        name = f"{self._prefix}{part}/{uuid.uuid4().hex[:8]}"
        bundle = self._bundle(part.role)
        with self._action(part):
            group = placement_group([bundle], strategy="STRICT_PACK", name=name, lifetime="detached")
            handle = (
                ray.remote(Holder)
                .options(
                    name=name,
                    namespace=NAMESPACE,
                    lifetime="detached",
                    max_restarts=0,
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
                )
                .remote(self._settings, part, name, tuple(peers))
            )
        self._actors[name] = _Actor(name, part, handle, time.time())

    def watch(self) -> list[PartStatus]:
        with self._action("the cluster"):
            self._find()
            self._free_places()
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            for actor in self._actors.values():
                actor.asked = actor.asked or actor.handle.status.remote()
            if asked := [actor.asked for actor in self._actors.values()]:
                ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
        for actor in list(self._actors.values()):
            self._look(actor, alive)
        running = [actor.status for actor in self._actors.values()]
        parts = {status.part for status in running}
        return [*running, *(status for part, status in self._gone.items() if part not in parts)]

    def address(self, part: Part, incarnation: str, peers: Sequence[str]) -> None:
        if (actor := self._actors.get(incarnation)) is not None:
            with self._action(part):
                actor.handle.tell.remote(tuple(peers))

    def drain(self, part: Part, incarnation: str, *, moves_streams: bool) -> None:
        if (actor := self._actors.get(incarnation)) is not None:
            with self._action(part):
                actor.handle.drain.remote(moves_streams)

    def kill(self, part: Part, incarnation: str) -> None:
        if (actor := self._actors.get(incarnation)) is None:
            gone = self._gone.get(part)
            if gone is not None and gone.incarnation == incarnation:  # lost: it fences itself
                self._gone[part] = replace(gone, state=State.ENDED)
            return
        with self._action(part), suppress(RayError):  # one that does not answer ends below, and its processes with it
            ray.get(actor.handle.kill.remote(), timeout=ANSWER_S)
        self._end(actor, State.ENDED)

    def log_tail(self, part: Part) -> str:
        return self._tails.get(part, "")

    def _find(self) -> None:
        """Adds the actors that an earlier controller has started."""
        for each in ray.util.list_named_actors(all_namespaces=True):
            name = each["name"]
            if each["namespace"] == NAMESPACE and name.startswith(self._prefix) and name not in self._actors:
                with suppress(ValueError):  # it has ended meanwhile, or is the controller
                    part = Part.parse(name.removeprefix(self._prefix).partition("/")[0])
                    self._actors[name] = _Actor(name, part, ray.get_actor(name, NAMESPACE), time.time())

    def _free_places(self) -> None:
        """Removes the places of actors that have ended while no controller looked.

        Ray keeps such a place, and moves it to another node if its own dies.
        """
        for group in placement_group_table().values():
            name = group["name"]
            if group["state"] != "REMOVED" and name.startswith(self._prefix) and name not in self._actors:
                with suppress(ValueError):  # it was removed meanwhile
                    remove_placement_group(ray.util.get_placement_group(name))

    def _look(self, actor: _Actor, alive: set[str]) -> None:
        now_s = time.monotonic()
        try:
            status: PartStatus = ray.get(actor.asked, timeout=0)
        except GetTimeoutError:
            if actor.has_answered and now_s - actor.heard_s > SILENT_S:
                actor.status = replace(actor.status, state=State.HUNG)
            return
        except RayError as error:
            self._tails[actor.status.part] = str(error).strip()
            is_node_lost = isinstance(error, RayActorError) and "node" in str(error).lower()
            self._end(actor, State.LOST if is_node_lost else State.ENDED)
            return
        actor.asked, actor.heard_s, actor.has_answered = None, now_s, True
        actor.status = replace(status, incarnation=actor.name)
        if status.state is State.ENDED:
            with suppress(RayError):
                self._tails[status.part] = ray.get(actor.handle.log_tail.remote(), timeout=ANSWER_S)
            self.kill(status.part, actor.name)

    def _end(self, actor: _Actor, state: State) -> None:
        """Ends the actor, and then releases its place."""
        self._actors.pop(actor.name, None)
        self._gone[actor.status.part] = replace(actor.status, state=state)
        with suppress(RayError, ValueError):
            ray.kill(actor.handle, no_restart=True)
        with suppress(RayError, ValueError):
            remove_placement_group(ray.util.get_placement_group(actor.name))

    def _bundle(self, role: Role) -> dict[str, float]:
        settings, bundle = self._settings, {"CPU": 1.0}
        resource = settings.scheduler_resource
        if role is Role.EXECUTOR:
            resource = settings.executor_resource
            if settings.num_gpus:
                bundle["GPU"] = settings.num_gpus
        return bundle | ({resource: _SHARE} if resource is not None else {})

    @contextmanager
    def _action(self, what: object) -> Iterator[None]:
        """Turns errors of Ray into BackendError."""
        try:
            self._check()
            yield
        except (RayError, ValueError, ConnectionError) as error:
            raise BackendError(f"{what}: {error}") from None
