"""The controller of a fleet as a detached actor of a Ray cluster.

Ray starts it again when it dies or when the head gives its node up, then on another one. What is wanted is kept in the
store of the head, so the new one goes on where the last one ended. The last one may still run and reach the head, so a
controller that finds the token of another one beside what is wanted ends itself before it acts.
"""

import json
import logging
import os
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from fleet.controller import Controller, clock_ahead_s
from fleet.ray_backend import NAMESPACE, RayBackend
from fleet.settings import FleetSettings
from fleet.wanted import FleetError, Wanted
from quire import logs

log = logging.getLogger(__name__)


def controller_name(fleet: str) -> str:
    return f"{fleet}/controller"


def store_key(fleet: str) -> bytes:
    """Returns the key in the store of the head under which what is wanted is kept."""
    return f"quire-fleet/{fleet}".encode()


class ControllerActor:
    """The class of the actor. The comparison runs on a thread of its own."""

    def __init__(self, settings: FleetSettings, wanted: Wanted) -> None:
        logs.configure("fleet", "info", "console")
        self._name = controller_name(settings.name)
        self._key = store_key(settings.name)
        self._token = uuid.uuid4().hex
        if ray.get_runtime_context().was_current_actor_reconstructed:
            saved = self._saved()  # nothing is kept of a fleet that was down before its controller had ended
            wanted = Wanted.from_json(saved["wanted"], clock_ahead_s()) if saved else wanted.down(0.0)
        self._put(wanted)
        self._controller = Controller(settings, wanted, RayBackend(settings, self._end_if_replaced), self._save)
        threading.Thread(target=self._run, daemon=True).start()

    def call(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Carries out a command; returns {"status": …}, or {"error": …} for one that is refused."""
        try:
            return {"status": self._controller.call(verb, arguments)}
        except FleetError as error:
            return error.as_answer()

    def _run(self) -> None:
        try:
            self._controller.run()
            _internal_kv_del(self._key)
        except Exception:
            log.exception("%s ends, and Ray starts it again", self._name)
            os._exit(1)
        with suppress(ValueError):
            ray.kill(ray.get_actor(self._name, NAMESPACE), no_restart=True)

    def _save(self, wanted: Wanted) -> None:
        self._end_if_replaced()
        self._put(wanted)

    def _put(self, wanted: Wanted) -> None:
        value = {"token": self._token, "wanted": wanted.as_json(clock_ahead_s())}
        _internal_kv_put(self._key, json.dumps(value).encode(), overwrite=True)

    def _saved(self) -> dict[str, Any]:
        saved: dict[str, Any] = json.loads(_internal_kv_get(self._key) or b"{}")
        return saved

    def _end_if_replaced(self) -> None:
        """Ends this process if another controller has the fleet, or if the fleet is down."""
        if self._saved().get("token") != self._token:
            print(f"{self._name} ends: another one has taken its place", flush=True)
            os._exit(1)
