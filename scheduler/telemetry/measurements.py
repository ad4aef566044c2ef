"""The counters and histograms of requests and steps. Recording costs a few additions into plain lists."""

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.histogram import Histogram
from scheduler.telemetry.tenant_counts import TenantCounts

if TYPE_CHECKING:
    from scheduler.core import FinishReason

FAST_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SCHEDULE_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
SLOW_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
TOKENS = tuple(2**i for i in range(21))

REJECTIONS = (
    "invalid_argument",
    "out_of_range",
    "resource_exhausted",
    "unavailable",
    "cancelled",
    "deadline_exceeded",
    "internal",
)
"""Expected reasons. Their counters start at 0, because a rate misses the first event of an absent counter."""

HISTOGRAMS = {
    "quire_time_to_first_token_seconds": (SLOW_S, "Time from a request's arrival to its first token"),
    "quire_inter_token_latency_seconds": (FAST_S, "Time between two tokens of a sequence"),
    "quire_time_per_output_token_seconds": (FAST_S, "Mean time between the tokens of a sequence"),
    "quire_e2e_request_latency_seconds": (SLOW_S, "Time from a request's arrival to the end of its last sequence"),
    "quire_request_queue_time_seconds": (SLOW_S, "Time from a request's arrival to the plan that first admits it"),
    "quire_request_prefill_time_seconds": (SLOW_S, "Time from the plan that first admits a request to its first token"),
    "quire_request_decode_time_seconds": (SLOW_S, "Time from a request's first token to the end of its last sequence"),
    "quire_request_prompt_tokens": (TOKENS, "Prompt tokens of a request, counted at its first admission"),
    "quire_request_generation_tokens": (TOKENS, "Tokens of a request's completions, counted when it ends"),
    "quire_step_batch_tokens": (TOKENS, "Tokens computed by a step, over all sequences"),
    "quire_grammar_compile_seconds": (
        FAST_S,
        "Time until a grammar that was not in the cache was compiled or refused, waiting included",
    ),
    "quire_schedule_duration_seconds": (SCHEDULE_S, "Time that the core took to plan a step"),
}
"""Bucket bounds and help text of each histogram."""


class Measurements:
    """Everything that the scheduler measures itself. Used on the event loop's thread.

    `clock` gives the time of every measurement, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self.inter_token_latency = self.histograms["quire_inter_token_latency_seconds"]
        self.num_prompt_tokens = {"computed": 0, "cached": 0}
        self.num_generation_tokens = 0
        self.num_resumed = 0
        self.num_finished: Counter[FinishReason] = Counter()
        self.num_rejected = Counter(dict.fromkeys(REJECTIONS, 0))
        self.num_grammars = Counter({"compiled": 0, "cached": 0, "refused": 0})
        self.tenants = TenantCounts(clock)
        self.num_refused_calls = Counter({"unauthenticated": 0, "permission_denied": 0})
