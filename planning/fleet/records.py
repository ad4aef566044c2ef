"""Records of a simulated fleet: one row for each request that has ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.routing.choice import Prompt
from planning.records import Requests
from planning.workload import Job
from scheduler.core import Events


@dataclass(slots=True)
class OpenRequest:
    """A request that has arrived and has not ended.

    router          number of the router that its client has chosen
    replica, number its replica, and its number among the requests of its router there
    num_received    output tokens that its client has received before it came to its replica
    first_token_s   None: it has no token yet
    """

    request_id: int
    job: Job
    router: int
    prompt: Prompt
    replica: str = ""
    number: int = 0
    num_received: int = 0
    planned_s: float | None = None
    first_token_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class FleetRecords:
    """Everything that a run has recorded.

    num_resumptions  streams that went on at another replica, because theirs had died
    num_gaps         gaps in the events of replicas; each was answered by a snapshot
    num_lost         reports that did not arrive
    max_waiting      longest queue of a replica
    """

    requests: Requests = field(default_factory=Requests)
    open: dict[int, OpenRequest] = field(default_factory=dict)
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

    def committed(
        self, now_s: float, planned_s: float, events: Events, *, has_first_tokens: bool
    ) -> tuple[list[OpenRequest], list[OpenRequest]]:
        """Records what a step has changed; returns the requests that got their first token, and those that ended."""
        began = []
        for sequence in events.started:
            entry = self.open[sequence.request.request_id]
            if entry.planned_s is None:
                entry.planned_s, entry.num_cached_tokens = planned_s, sequence.num_cached_tokens or 0
        if has_first_tokens:
            for sequence in events.sequences:
                entry = self.open[sequence.request.request_id]
                if len(sequence.token_ids) == sequence.num_given_tokens + 1:
                    began.append(entry)
                    if entry.first_token_s is None:
                        entry.first_token_s = now_s
        ended = []
        for sequence, _ in events.finished:
            entry = self.open.pop(sequence.request.request_id)
            entry.num_preemptions += sequence.num_preemptions
            self._close(entry, now_s, sequence.num_tokens)
            ended.append(entry)
        return began, ended

    def _close(self, entry: OpenRequest, now_s: float, num_tokens: int) -> None:
        job, requests = entry.job, self.requests
        requests.tenant.append(job.tenant)
        requests.arrival_s.append(job.arrival_s)
        requests.planned_s.append(now_s if entry.planned_s is None else entry.planned_s)
        requests.first_token_s.append(now_s if entry.first_token_s is None else entry.first_token_s)
        requests.end_s.append(now_s)
        requests.num_prompt_tokens.append(job.num_prompt_tokens)
        requests.num_output_tokens.append(num_tokens - job.num_prompt_tokens)
        requests.num_cached_tokens.append(entry.num_cached_tokens)
        requests.num_preemptions.append(entry.num_preemptions)
