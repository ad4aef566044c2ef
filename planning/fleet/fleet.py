"""The parameters of a simulated fleet."""

from dataclasses import dataclass, field

from planning.fleet.failures import Failures

ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The parameters of a fleet.

    routing        a policy of gateway.routing, or "oracle"
    event_delay_s  time that a report takes from a replica to a router
    event_loss     probability that a report is lost on its way to a router
    """

    num_replicas: int
    routing: str = "cost"
    num_routers: int = 1
    event_delay_s: float = 0.0
    event_loss: float = 0.0
    failures: Failures = field(default_factory=Failures)
