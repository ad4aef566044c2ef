"""The way of reports from replicas to routers: each takes the same time, and some are lost."""

import random
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from planning.fleet.report import Report
from planning.fleet.router import Router

_Delivery = tuple[float, int, Callable[[float], None]]


class Network:
    """Delivers reports after `delay_s`. Each is lost on its way to each router with the probability `loss`."""

    def __init__(self, delay_s: float, loss: float, rng: random.Random) -> None:
        self.num_lost = 0
        self._delay_s = delay_s
        self._loss = loss
        self._rng = rng
        self._deliveries: list[_Delivery] = []
        self._num_deliveries = 0

    @property
    def loses(self) -> bool:
        """True if reports can be lost."""
        return self._loss > 0

    @property
    def next_s(self) -> float:
        return self._deliveries[0][0] if self._deliveries else inf

    def deliver(self) -> None:
        """Delivers what is due next."""
        now_s, _, deliver = heappop(self._deliveries)
        deliver(now_s)

    def broadcast(self, report: Report, routers: Sequence[Router], now_s: float) -> None:
        """Sends a report to all routers."""
        for router in routers:
            if self._loss and self._rng.random() < self._loss:
                self.num_lost += 1
            else:
                self.send(report, router, now_s)

    def send(self, report: Report, router: Router, now_s: float) -> None:
        """Sends a report to one router; it is not lost."""
        if self._delay_s:
            self.after_delay(now_s, lambda _: router.receive(report))
        else:
            router.receive(report)

    def after_delay(self, now_s: float, action: Callable[[float], None]) -> None:
        """Calls `action` when a message that is sent now arrives, with that time."""
        self.at(now_s + self._delay_s, action)

    def at(self, time_s: float, action: Callable[[float], None]) -> None:
        """Calls `action` at a time, with that time."""
        self._num_deliveries += 1
        heappush(self._deliveries, (time_s, self._num_deliveries, action))
