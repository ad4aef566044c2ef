"""An actor that holds one part on a node of a Ray cluster.

No token and no plan passes through Ray: the actor starts the processes, looks after them, and ends them. They end when
the actor does. An actor whose node the head has given up fences itself: the head starts another one elsewhere, and what
still runs here would hold devices for nothing.
"""

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from fleet.hosted_part import HostedPart
from fleet.parts import Part, PartStatus
from fleet.settings import FleetSettings
from quire.addresses import UNIX, private_files, private_socket

FENCE_S = 20.0
"""Time without an answer of the head after which a part ends itself. The head of a cluster without a replicated store
that is gone for longer takes its nodes with it anyway."""

_INTERVAL_S = 1.0


class Fence:
    """Watches from threads of its own, so that a busy actor is fenced, too.

    is_alive  asks the head whether it counts on this node; raises an exception, or does not return, without a head
    end       ends the part and this process
    """

    def __init__(
        self,
        is_alive: Callable[[], bool],
        end: Callable[[str], None],
        fence_s: float = FENCE_S,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._is_alive = is_alive
        self._end = end
        self._fence_s = fence_s
        self._interval_s = interval_s
        self._heard_s = time.monotonic()
        self._has_ended = threading.Event()

    def start(self) -> None:
        for work in (self._ask, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self._has_ended.set()

    def _ask(self) -> None:
        while not self._has_ended.wait(self._interval_s):
            with suppress(Exception):
                if not self._is_alive():
                    self._end_once("the head has given this node up")
                    return
                self._heard_s = time.monotonic()

    def _watch(self) -> None:
        while not self._has_ended.wait(self._interval_s):
            if time.monotonic() - self._heard_s > self._fence_s:
                self._end_once(f"the head has not answered for {self._fence_s:g} s")
                return

    def _end_once(self, reason: str) -> None:
        if not self._has_ended.is_set():
            self._has_ended.set()
            self._end(reason)


class Holder:
    """The class of the actor. Its methods run one after the other on the main thread, to which the processes are
    bound."""

    def __init__(self, settings: FleetSettings, part: Part, name: str, peers: Sequence[str]) -> None:
        folder = _private_folder(name)
        host = ray.util.get_node_ip_address()
        self._name = name
        self._folder = folder
        self._hosted = HostedPart(settings, part, folder, host, dies_with_parent=True)
        self._hosted.start(peers)
        node = ray.get_runtime_context().get_node_id()
        self._fence = Fence(lambda: _is_alive(node), self._end)
        self._fence.start()

    def status(self) -> PartStatus:
        status = self._hosted.status()
        if status is None:
            raise RuntimeError(f"{self._name} has started nothing")
        return status

    def tell(self, peers: Sequence[str]) -> None:
        self._hosted.tell(peers)

    def drain(self, breaks_off: bool) -> None:
        self._hosted.drain(breaks_off=breaks_off)

    def kill(self) -> None:
        """Kills the processes, and returns when they are gone or after a few seconds."""
        self._hosted.kill()
        self._hosted.until_gone(timeout_s=5.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def log_tail(self) -> str:
        return self._hosted.log_tail()

    def _end(self, reason: str) -> None:
        print(f"{self._name} ends: {reason}", flush=True)
        self._hosted.kill()
        os._exit(1)


def _is_alive(node_id: str) -> bool:
    nodes: Any = ray.nodes  # its types are not known everywhere
    return any(node["NodeID"] == node_id and node["Alive"] for node in nodes())


def _private_folder(name: str) -> Path:
    """Makes a folder that only this user can use, and that systemd-tmpfiles leaves alone while this process runs."""
    folder = Path(private_socket(name.replace("/", "-")).removeprefix(UNIX)).with_suffix("")
    with private_files(f"{UNIX}{folder}"):
        pass
    folder.mkdir(mode=0o700)
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)  # it looks into no directory that is locked
    return folder
