"""A fleet without processes: a backend whose parts are values, on a clock that the test moves."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from fleet.backend import BackendError
from fleet.parts import Load, Part, PartStatus, Role, State


class FakeBackend:
    """Starts parts that a test makes ready, or lets die.

    now_s      the clock
    log        every verb, in order
    refuses    verbs that raise BackendError
    ready_in   looks after which a part is ready
    ends_when_drained  False: a part that drains waits for its streams
    last_line  of every log
    """

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.log: list[tuple[str, Part]] = []
        self.refuses: set[str] = set()
        self.ready_in = 1
        self.ends_when_drained = True
        self.last_line = "the last line"
        self.incarnations: dict[str, PartStatus] = {}
        self.loads: dict[Part, Load] = {}
        self._looks: dict[str, int] = {}
        self._numbers = count(1)

    # --- verbs --------------------------------------------------------------------------------------------------

    def start(self, part: Part, peers: Sequence[str]) -> None:
        self._do("start", part)
        assert not self.running(part), f"{part} was started while another incarnation of it runs"
        incarnation = f"i{next(self._numbers)}"
        self.incarnations[incarnation] = PartStatus(
            part,
            incarnation,
            State.STARTING,
            self.now_s,
            address=f"{part}:{len(self.incarnations)}",
            peers=tuple(peers),
        )
        self._looks[incarnation] = 0

    def watch(self) -> list[PartStatus]:
        self._do("watch", Part(Role.GATEWAY, 0))
        for name, status in list(self.incarnations.items()):
            self._looks[name] += 1
            if status.state is State.STARTING and self._looks[name] > self.ready_in:
                self.incarnations[name] = replace(status, state=State.READY)
            elif status.is_draining and status.state is State.READY and self.ends_when_drained:
                self.incarnations[name] = replace(status, state=State.ENDED, exit_code=0)
        return [replace(status, load=self.loads.get(status.part)) for status in self.incarnations.values()]

    def address(self, part: Part, incarnation: str, peers: Sequence[str]) -> None:
        self._do("address", part)
        self._change(incarnation, peers=tuple(peers))

    def drain(self, part: Part, incarnation: str, *, moves_streams: bool) -> None:
        self._do("drain", part)
        self._change(incarnation, is_draining=True)

    def kill(self, part: Part, incarnation: str) -> None:
        self._do("kill", part)
        self.end(incarnation, -9)

    def log_tail(self, part: Part) -> str:
        return self.last_line

    # --- for tests ----------------------------------------------------------------------------------------------

    def running(self, part: Part) -> list[PartStatus]:
        return [each for each in self.incarnations.values() if each.part == part and each.state.occupies]

    def parts(self, state: State = State.READY) -> list[str]:
        """Returns the names of the parts in a state."""
        return sorted(str(each.part) for each in self.incarnations.values() if each.state is state)

    def end(self, incarnation: str, exit_code: int = 1) -> None:
        self._change(incarnation, state=State.ENDED, exit_code=exit_code)

    def set_state(self, part: Part, state: State) -> None:
        for each in self.running(part):
            self._change(each.incarnation, state=state)

    def verbs(self, verb: str) -> list[str]:
        return [str(part) for name, part in self.log if name == verb]

    def _change(self, incarnation: str, **changes: object) -> None:
        if incarnation in self.incarnations:
            self.incarnations[incarnation] = replace(self.incarnations[incarnation], **changes)  # type: ignore[arg-type]

    def _do(self, verb: str, part: Part) -> None:
        if verb in self.refuses:
            raise BackendError(f"{verb} does not work")
        if verb != "watch":
            self.log.append((verb, part))
