"""The message by which a replica reports to the routers."""

from dataclasses import dataclass

from gateway.routing.load import ReplicaLoad


@dataclass(frozen=True, slots=True)
class Report:
    """A report of a replica.

    incarnation    number of its start; a report of an earlier incarnation is ignored
    load           its load
    num_received   number of requests that it has received, by router
    first_number   number of the first event; published and forgotten digests have consecutive numbers
    is_snapshot    `published` are all digests, `first_number` is that of the next event
    """

    replica: str
    incarnation: int
    load: ReplicaLoad
    num_received: tuple[int, ...]
    first_number: int
    published: list[int]
    forgotten: list[int]
    is_snapshot: bool = False
