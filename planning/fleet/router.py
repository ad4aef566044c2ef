"""A simulated router: the shipped knowledge of replicas, and the shipped choice."""

from collections.abc import Callable, Iterable

from gateway.routing.choice import Choice, Prompt, num_uncached_tokens
from gateway.routing.replicas import Replicas
from planning.fleet.report import Report

_NO_INCARNATION = 0


class Router:
    """Router number `number`. `ask` is called with a replica's name when its events have a gap."""

    def __init__(
        self, number: int, names: Iterable[str], choice: Choice, replicas: Replicas, ask: Callable[[str], None]
    ):
        self.number = number
        self.replicas = replicas
        self.num_gaps = 0
        self._choice = choice
        self._ask = ask
        self._incarnations: dict[str, int] = {}
        self._asked: set[str] = set()
        for name in names:
            self.replicas.add(name)

    def connected(self, name: str, incarnation: int) -> None:
        """Called when a replica has started."""
        self._incarnations[name] = incarnation
        self.replicas.set_ready(name, True)

    def disconnected(self, name: str) -> None:
        """Called when a replica has died. Its reports that are still on their way are ignored."""
        self._incarnations[name] = _NO_INCARNATION
        self._asked.discard(name)
        self.replicas.set_ready(name, False)
        self.replicas[name].reset()

    def receive(self, report: Report) -> None:
        name = report.replica
        if report.incarnation != self._incarnations[name]:
            return
        view = self.replicas[name].view
        if report.is_snapshot:
            view.replace(report.first_number - 1, report.published)
            self._asked.discard(name)
        elif not view.apply(report.first_number, report.published, report.forgotten) and name not in self._asked:
            self.num_gaps += 1
            self._asked.add(name)
            self._ask(name)
        self.replicas.report(name, report.load, report.num_received[self.number])

    def send(self, prompt: Prompt) -> tuple[str, int] | None:
        """Chooses a replica, counts the request there, and returns both; None if no replica is ready."""
        name = self._choice.choose(prompt, self.replicas)
        if name is None:
            return None
        state = self.replicas[name]
        return name, state.count(num_uncached_tokens(prompt, state), prompt.digests)
