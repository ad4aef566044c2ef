"""The controller of one fleet: compares wanted and real again and again, and carries out commands.

It holds no process and no stream. If it dies, everything goes on as it is; the next one reads what is wanted, and finds
the parts that run.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fleet.autoscale import Memory, Scaling, decide, remember
from fleet.backend import Backend, BackendError
from fleet.parts import Load, Part, PartStatus, Role, State
from fleet.reconcile import Action, Address, Drain, Kill, Start, ended_replicas, reconcile
from fleet.restarts import Restarts
from fleet.settings import FleetSettings
from fleet.wanted import FleetError, Wanted
from quire.logs import event_of

log = logging.getLogger(__name__)

TICK_S = 0.5
LOOK_TIMEOUT_S = 10.0
"""Time for which a question waits until a controller that has just started knows its parts."""


class Controller:
    """Serves commands on any thread while `run` runs on another one.

    save   keeps what is wanted, before it is acted on
    clock  of deadlines, pauses and measurements; it cannot be set
    """

    def __init__(
        self,
        settings: FleetSettings,
        wanted: Wanted,
        backend: Backend,
        save: Callable[[Wanted], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._wanted = wanted
        self._backend = backend
        self._save = save
        self._clock = clock
        self._lock = threading.Lock()
        self._statuses: list[PartStatus] = []
        self._restarts = Restarts()
        self._problems: dict[Part, str] = {}  # of parts whose last start has failed
        self._memory = Memory()
        self._loads: tuple[float, dict[str, Load]] = (0.0, {})
        self._has_looked = threading.Event()

    def run(self, tick_s: float = TICK_S) -> None:
        """Returns when the fleet is down."""
        while not self.tick():
            time.sleep(tick_s)

    def tick(self) -> bool:
        """Compares once. Returns whether the fleet is down and nothing of it is left."""
        try:
            statuses = self._backend.watch()
        except BackendError as error:
            log.error("the fleet cannot be watched: %s", error)
            return False
        now_s = self._clock()
        for each in self._restarts.note(statuses, now_s):
            log.warning("%s has ended (%s): %s", each.part, _end(each), self._last_line(each))
        with self._lock:
            self._statuses = statuses
            self._has_looked.set()
            try:
                if (scaling := self._scaling()) is not None:
                    self._scale(scaling, statuses, now_s)
                if ended := ended_replicas(self._wanted, statuses):
                    self._want(self._wanted.without(ended))
            except FleetError as error:
                log.error("%s", error)
            wanted = self._wanted
        actions = reconcile(wanted, statuses, now_s, self._restarts.not_before_s)
        for action in actions:
            self._carry_out(action, now_s)
        return wanted.down_by_s is not None and not actions and not any(each.state.occupies for each in statuses)

    def call(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Carries out a command, and returns the status. Raises FleetError."""
        if verb == "status" and not self._has_looked.wait(LOOK_TIMEOUT_S):
            raise FleetError("the controller cannot watch the fleet: see its log")
        with self._lock:
            drain_by_s = self._clock() + float(arguments.get("timeout_s", self._settings.drain_timeout_s))
            match verb:
                case "status":
                    pass
                case "scale":
                    self._want(self._wanted.scaled(int(arguments["replicas"]), drain_by_s))
                case "drain":
                    self._want(self._wanted.drained(int(arguments["replica"]), drain_by_s))
                case "down":
                    self._want(self._wanted.down(drain_by_s), is_urgent=True)
                case _:
                    raise FleetError(f"there is no command {verb!r}")
            return self._report()

    def _want(self, wanted: Wanted, *, is_urgent: bool = False) -> None:
        """Raises FleetError if it cannot be kept, as on a full disk.

        What is urgent is done nevertheless. A controller that is restarted meanwhile does not know of it.
        """
        if wanted == self._wanted:
            return
        try:
            self._save(wanted)
        except OSError as error:
            problem = f"what is wanted cannot be kept: {error.strerror or error}"
            if not is_urgent:
                raise FleetError(problem) from None
            log.error("%s", problem)
        self._wanted = wanted

    def _carry_out(self, action: Action, now_s: float) -> None:
        log.info("%s %s", type(action).__name__.lower(), action.part)
        try:
            match action:
                case Start(part, peers):
                    self._backend.start(part, peers)
                    self._problems.pop(part, None)
                case Address(part, incarnation, peers):
                    self._backend.address(part, incarnation, peers)
                case Drain(part, incarnation, moves_streams):
                    self._backend.drain(part, incarnation, moves_streams=moves_streams)
                case Kill(part, incarnation):
                    self._backend.kill(part, incarnation)
        except BackendError as error:
            log.error("%s: %s", type(action).__name__.lower(), error)
            if isinstance(action, Start):
                self._problems[action.part] = str(error)
                self._restarts.pause(action.part, now_s)

    def _scaling(self) -> Scaling | None:
        settings = self._settings
        if settings.target_ttft_ms is None or self._wanted.down_by_s is not None:
            return None
        return Scaling(settings.min_replicas, settings.max_replicas, settings.target_ttft_ms / 1000)

    def _scale(self, scaling: Scaling, statuses: list[PartStatus], now_s: float) -> None:
        serving = self._wanted.serving
        loads = {
            each.incarnation: each.load
            for each in statuses
            if each.load is not None and each.part.index in serving and each.state is State.READY
        }
        last_s, last = self._loads
        both = sorted(last.keys() & loads.keys())
        before, after = [last[name] for name in both], [loads[name] for name in both]
        self._memory = remember(self._memory, before, after, now_s - last_s if last else 0.0)
        self._loads = now_s, loads
        number, self._memory = decide(scaling, self._memory, list(loads.values()), len(serving), len(loads), now_s)
        if number != len(serving):
            log.info("predicted time to the first token: %.2f s: %d replicas", self._memory.predicted_s, number)
            self._want(self._wanted.scaled(number, now_s + self._settings.drain_timeout_s))

    def _report(self) -> dict[str, Any]:
        """Returns the state of the fleet as JSON for `quire fleet status`."""
        wanted = self._wanted
        present = {each.part for each in self._statuses}
        absent = [part for part in list(self._problems) if part not in present]  # the other thread changes them
        statuses = [*self._statuses, *(PartStatus(part, "", State.ENDED, time.time()) for part in absent)]
        return {
            "name": self._settings.name,
            "backend": self._settings.backend,
            "model": self._settings.model,
            "controller_pid": os.getpid(),
            "wanted": wanted.as_json(clock_ahead_s()),
            "predicted_ttft_s": None if self._scaling() is None else round(self._memory.predicted_s, 3),
            "parts": [
                {
                    "part": str(each.part),
                    "is_wanted": self._is_wanted(each.part),
                    "state": _state(each),
                    "address": each.address,
                    "machine": each.machine,
                    "pid": each.pid,
                    "age_s": round(max(0.0, time.time() - each.started_s), 1),
                    "num_ends": self._restarts.num_ends(each.part),
                    "num_alike_ends": self._restarts.num_alike(each.part),
                    "exit_code": each.exit_code,
                    "num_requests": None if each.load is None else each.load.num_requests,
                    "last_line": "" if each.state.occupies else self._last_line(each),
                }
                for each in sorted(statuses, key=lambda each: (each.part.role, each.part.index))
                if each.state.occupies or self._is_wanted(each.part)
            ],
        }

    def _is_wanted(self, part: Part) -> bool:
        if part.role is Role.GATEWAY:
            return part.index < self._wanted.gateways
        return part.index in self._wanted.serving

    def _last_line(self, status: PartStatus) -> str:
        if (problem := self._problems.get(status.part)) is not None:
            return problem
        try:
            return event_of((self._backend.log_tail(status.part).strip().splitlines() or [""])[-1])
        except BackendError:
            return ""


def clock_ahead_s() -> float:
    """Returns by how much the clock of people and files (time.time) is ahead of the clock of a controller."""
    return time.time() - time.monotonic()


def _state(status: PartStatus) -> str:
    """Returns the state for people: a scheduler that was ready once waits while its executor is away."""
    if status.is_draining and status.state.occupies:
        return "draining"
    if status.state is State.READY and status.load is not None and not status.load.has_executor:
        return "waiting"
    return str(status.state)


def _end(status: PartStatus) -> str:
    if status.state is State.LOST:
        return "its machine is gone"
    return "exit code unknown" if status.exit_code is None else f"exit code {status.exit_code}"
