"""The controller of a fleet as a detached actor of a Ray cluster.

Ray starts it again when it dies, perhaps on another node. What is wanted is kept in the store of the head, so the new
one goes on where the last one ended.
"""

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from fleet.controller import Controller
from fleet.ray_backend import NAMESPACE, RayBackend
from fleet.settings import FleetSettings
from fleet.wanted import FleetError, Wanted
from quire import logs


def controller_name(fleet: str) -> str:
    return f"{fleet}/controller"


class ControllerActor:
    """The class of the actor. The comparison runs on a thread of its own."""

    def __init__(self, settings: FleetSettings, wanted: Wanted) -> None:
        logs.configure("fleet", "info", "console")
        self._key = f"quire-fleet/{settings.name}".encode()
        saved = _internal_kv_get(self._key)
        if saved is None:
            self._save(wanted)
        else:
            wanted = Wanted.from_json(json.loads(saved))
        self._name = controller_name(settings.name)
        self._controller = Controller(settings, wanted, RayBackend(settings), self._save)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def call(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Carries out a command; returns {"status": …}, or {"error": …} for one that is refused."""
        if not self._thread.is_alive():
            raise RuntimeError("the controller has failed")  # Ray's caller sees it, and the log says why
        try:
            return {"status": self._controller.call(verb, arguments)}
        except FleetError as error:
            return {"error": str(error)}

    def _run(self) -> None:
        self._controller.run()
        _internal_kv_del(self._key)
        with suppress(ValueError):
            ray.kill(ray.get_actor(self._name, NAMESPACE), no_restart=True)

    def _save(self, wanted: Wanted) -> None:
        _internal_kv_put(self._key, json.dumps(wanted.as_json()).encode(), overwrite=True)
