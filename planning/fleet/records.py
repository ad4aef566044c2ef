"""Records of a simulated fleet: one row for each request that has ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.routing.choice import Prompt
from planning.records import OpenRequest, Requests


@dataclass(slots=True, kw_only=True)
class RoutedRequest(OpenRequest):
    """An open request, with its place in the fleet.

    router          number of the router that its client has chosen
    replica, number its replica, and its number among the requests of its router there
    num_received    output tokens that its client has received before it came to its replica
    """

    request_id: int
    router: int
    prompt: Prompt
    replica: str = ""
    number: int = 0
    num_received: int = 0


@dataclass(slots=True)
class FleetRecords:
    """Everything that a run has recorded.

    num_resumptions  streams that went on at another replica, because theirs had died
    num_gaps         gaps in the events of replicas; each was answered by a snapshot
    num_lost         reports that did not arrive
    max_waiting      longest queue of a replica
    """

    requests: Requests = field(default_factory=Requests)
    open: dict[int, RoutedRequest] = field(default_factory=dict)
    num_refused: int = 0
    num_resumptions: int = 0
    num_deaths: int = 0
    num_gaps: int = 0
    num_lost: int = 0
    max_waiting: int = 0
    virtual_s: float = 0.0
    num_hit_tokens: int = 0
    num_queried_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    replica_requests: Sequence[int] = ()
    replica_busy_s: Sequence[float] = ()

    @property
    def num_ended(self) -> int:
        return len(self.requests.end_s)
