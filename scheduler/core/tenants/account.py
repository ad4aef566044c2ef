"""The account of a tenant: what the operator grants it, and how much service it has received."""

from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_TENANT = "default"
"""The tenant of requests whose client has no identity."""

PROMPT_TOKEN_COST = 1
"""Service of a prompt token that is computed. A prompt token from the prefix cache costs nothing."""

GENERATED_TOKEN_COST = 2
"""Service of a generated token of one sequence or beam, as in the paper: it occupies a row of a step by itself."""

PROMPT_LOGPROBS_COST = 2
"""Service, in addition to PROMPT_TOKEN_COST, of a prompt token that is reported with log-probabilities.

On the CPU a prompt token with 20 log-probabilities took 2.3 to 3.6 times as long as one without
(400 tokens, tiny model, 2026-11-22).
"""


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """The terms that the operator grants a tenant.

    weight                     share of the service, relative to the weights of other tenants that have requests
    priority                   tenants of a lower number are admitted first; shares hold among equal priorities
    max_num_seqs               sequences and beams that run at once; None: no limit of its own, as for the next two
    max_waiting_requests       waiting requests; a request beyond it is refused
    max_waiting_prompt_tokens  prompt tokens of waiting requests; an empty queue takes any request
    """

    weight: float = 1.0
    priority: int = 0
    max_num_seqs: int | None = None
    max_waiting_requests: int | None = None
    max_waiting_prompt_tokens: int | None = None


TermsOf = Callable[[str], TenantTerms]
"""Returns the terms of a tenant, by its name."""


def equal_terms(tenant: str) -> TenantTerms:
    """Returns the same terms for every tenant."""
    return TenantTerms()


class Account:
    """The service that one tenant has received.

    cost          service in tokens, weighted by their costs; it only grows
    mark          the level at the tenant's last admission, its prompt included
    entry_level   the level to which it was last lifted
    num_requests  requests that have not ended
    num_displaced sequences of other tenants that were preempted to give this one a slot, and wait to be admitted again
    """

    __slots__ = ("cost", "entry_level", "lift", "mark", "name", "num_displaced", "num_requests", "terms")

    def __init__(self, name: str = DEFAULT_TENANT, terms: TenantTerms | None = None) -> None:
        self.name = name
        self.terms = terms or TenantTerms()
        self.cost = 0
        self.lift = 0.0
        self.mark = 0.0
        self.entry_level = 0.0
        self.num_requests = 0
        self.num_displaced = 0

    @property
    def level(self) -> float:
        """The virtual counter: service divided by the weight, plus what the tenant forwent while none waited."""
        return self.lift + self.cost / self.terms.weight

    def raise_to(self, level: float) -> None:
        """Lifts the counter if it is lower."""
        missing = level - self.level
        if missing > 0.0:
            self.lift += missing
            self.mark += missing
            self.entry_level = self.level


NO_ACCOUNT = Account("")
"""The account of sequences that no scheduler has accepted."""
