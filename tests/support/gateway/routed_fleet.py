"""A toy fleet for tests of choices: replicas that hold whole prompts and report, without time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.routing.choice import Choice, Prompt, num_uncached_tokens
from gateway.routing.load import ReplicaLoad
from gateway.routing.replicas import Replicas

BLOCK_SIZE = 16
PREFILL_S = 1e-4


def replicas_of(*names: str) -> Replicas:
    """Returns replicas that are ready, idle and equally fast."""
    replicas = Replicas()
    for name in names:
        replicas.add(name)
        replicas.set_ready(name, True)
        replicas.report(name, idle(), 0)
    return replicas


def idle() -> ReplicaLoad:
    return ReplicaLoad(prefill_s_per_token=PREFILL_S, decode_step_s=1e-4)


def busy(num_requests: int, queued_tokens: int) -> ReplicaLoad:
    return ReplicaLoad(num_requests, 0, queued_tokens, PREFILL_S, 1e-4)


def prompt(name: str, num_blocks: int = 256, num_shared_blocks: int | None = None) -> Prompt:
    """Returns a prompt of full blocks and one more token. The first `num_shared_blocks` belong to all of this name."""
    family = name.partition("/")[0]
    num_shared = num_blocks if num_shared_blocks is None else num_shared_blocks
    owners = [family if i < num_shared else name for i in range(num_blocks)]
    digests = [hash((owner, i)) & 0xFFFF_FFFF_FFFF_FFFF for i, owner in enumerate(owners)]
    return Prompt(family.encode(), num_blocks * BLOCK_SIZE + 1, digests, BLOCK_SIZE)


@dataclass(slots=True)
class Site:
    """A replica: what it holds, what it has queued, and the requests that it received from each router."""

    held: set[int] = field(default_factory=set)
    news: list[int] = field(default_factory=list)
    num_running: int = 0
    queued_tokens: int = 0
    num_events: int = 0
    received: Counter[int] = field(default_factory=Counter)


class RoutedFleet:
    """Replicas behind one or several routers. Requests stay until `serve` computes prompts, or `end` ends them."""

    def __init__(self, choices: Sequence[Choice], num_replicas: int) -> None:
        self.names = [f"replica-{i}" for i in range(num_replicas)]
        self.choices = choices
        self.routers = [replicas_of(*self.names) for _ in choices]
        self.sites = {name: Site() for name in self.names}
        self.sent: Counter[str] = Counter()
        self.num_hits = 0

    def send(self, asked: Prompt, router: int = 0) -> str:
        """Sends a request, and counts as a hit if its replica holds all its blocks."""
        replicas = self.routers[router]
        name = self.choices[router].choose(asked, replicas)
        assert name is not None
        replicas[name].count(num_uncached_tokens(asked, replicas[name]), asked.digests)
        site = self.sites[name]
        num_missing = sum(digest not in site.held for digest in asked.digests)
        self.num_hits += not num_missing
        site.news += [digest for digest in asked.digests if digest not in site.held]
        site.held.update(asked.digests)
        site.queued_tokens += 1 + BLOCK_SIZE * num_missing
        site.num_running += 1
        site.received[router] += 1
        self.sent[name] += 1
        return name

    def serve(self, num_tokens: int) -> None:
        """Lets each replica compute prompt tokens."""
        for site in self.sites.values():
            site.queued_tokens = max(0, site.queued_tokens - num_tokens)

    def end(self) -> None:
        """Ends the requests whose prompts are computed, at replicas without a queue."""
        for site in self.sites.values():
            if not site.queued_tokens:
                site.num_running = 0

    def report(self) -> None:
        """Reports everything to all routers."""
        for name, site in self.sites.items():
            for number, replicas in enumerate(self.routers):
                assert replicas[name].view.apply(site.num_events + 1, site.news, [])
                replicas.report(name, busy(site.num_running, site.queued_tokens), site.received[number])
            site.num_events += len(set(site.news))
            site.news = []

    def imbalance(self) -> float:
        """Returns the requests of the replica with the most, divided by their mean."""
        return max(self.sent.values()) * len(self.names) / self.sent.total()
