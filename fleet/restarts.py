"""Counts the ends of each part, and says when it may start again. Pure: the caller passes the times.

The times are on one clock that cannot be set. Those at which parts have started are not: they come from their machines.
"""

from collections import Counter
from collections.abc import Iterable

from fleet.parts import Part, PartStatus, State

FIRST_DELAY_S = 0.2
MAX_DELAY_S = 30.0
HEALTHY_S = 60.0
"""A part that was seen to run for so long starts at once when it ends."""


class Restarts:
    """The first start after an end comes after FIRST_DELAY_S, each further one after twice the delay before it."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._since_s: dict[str, float] = {}  # when each incarnation that runs was seen first
        self._num_ends: Counter[Part] = Counter()
        self._alike: dict[Part, tuple[int | None, int]] = {}  # the last exit code, and its number in a row
        self._num_in_a_row: dict[Part, int] = {}
        self._not_before_s: dict[Part, float] = {}

    def note(self, statuses: Iterable[PartStatus], now_s: float) -> list[PartStatus]:
        """Counts the incarnations that have ended or are lost since the last call, and returns them."""
        statuses = list(statuses)
        gone = [each for each in statuses if each.state in (State.ENDED, State.LOST)]
        new = [each for each in gone if each.incarnation not in self._seen]
        self._seen = {each.incarnation for each in gone}
        for each in new:
            if now_s - self._since_s.get(each.incarnation, now_s) >= HEALTHY_S:
                self._num_in_a_row.pop(each.part, None)
            self._num_ends[each.part] += 1
            code, num_alike = self._alike.get(each.part, (None, 0))
            self._alike[each.part] = each.exit_code, 1 + num_alike * (code == each.exit_code)
            self.pause(each.part, now_s)
        running = {each.incarnation for each in statuses} - self._seen
        self._since_s = {name: self._since_s.get(name, now_s) for name in running}
        return new

    def pause(self, part: Part, now_s: float) -> None:
        """Lets the next start of a part wait: it has ended, or could not be started."""
        num = self._num_in_a_row.get(part, 0)
        self._num_in_a_row[part] = num + 1
        self._not_before_s[part] = now_s + min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num, 64))

    def not_before_s(self, part: Part) -> float:
        """Returns the time before which the part should not start; 0 if it has not ended."""
        return self._not_before_s.get(part, 0.0)

    def num_ends(self, part: Part) -> int:
        """Returns the number of ends that were noted."""
        return self._num_ends[part]

    def num_alike(self, part: Part) -> int:
        """Returns how many of the last ends, one after the other, had the same exit code."""
        return self._alike.get(part, (None, 0))[1]
