"""Chooses the number of replicas by the time to the first token that a new request would see. Pure.

predicted time   queued prompt tokens ÷ measured prefill rate, and at least the age of the queue: what waits now has
                 waited so long, so the next request will, too
prefill rate     prompt tokens computed per second while something waited, by all replicas: an idle one computes less
                 than it could

The fleet grows as soon as the prediction has exceeded the target for GROW_AFTER_S, by as many replicas as the excess
asks for, at most to twice its size. It shrinks by one replica after the prediction was so low, for SHRINK_AFTER_S, that
one replica less would still stay below half the target, if the others can also compute what all compute now. A fleet
without a queue predicts nothing: without the second condition, it would shrink until it is too small, and grow again.
New replicas take time to load: nothing is decided while one starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleet.parts import Load

GROW_AFTER_S = 3.0
SHRINK_AFTER_S = 120.0
SHRINK_BELOW = 0.5
MAX_USE = 0.8
"""Largest share of the prefill rate of those that are left which the prompts may need when the fleet shrinks."""

HALF_LIFE_S = 30.0
"""Time after which a measurement counts half: of waiting for the rate, of any for what is computed."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The settings.

    max_replicas    at least min_replicas
    target_ttft_s   the prediction should stay below this
    """

    min_replicas: int
    max_replicas: int
    target_ttft_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """The measurements that one look passes on to the next.

    busy_s, tokens   time for which a replica had a queue, and prompt tokens that it computed then; both decay
    all_s, computed  time that was looked at, and prompt tokens that all replicas computed then; both decay
    high_since_s     time since which the prediction exceeds the target without a break; None: it does not
    low_since_s      time since which one replica less would do
    predicted_s      the last prediction, for people
    """

    busy_s: float = 0.0
    tokens: float = 0.0
    all_s: float = 0.0
    computed: float = 0.0
    high_since_s: float | None = None
    low_since_s: float | None = None
    predicted_s: float = 0.0


def remember(memory: Memory, before: Sequence[Load], after: Sequence[Load], elapsed_s: float) -> Memory:
    """Measures the prefill rate of one replica, and what all replicas compute.

    before, after  the loads of the same schedulers in the same order, at two times. One that has a queue at both times
                   is taken to have had one in between
    """
    busy_s = tokens = all_tokens = 0.0
    for earlier, later in zip(before, after, strict=True):
        computed = later.computed_tokens - earlier.computed_tokens
        if computed < 0:  # a scheduler that was restarted counts from 0
            continue
        all_tokens += computed
        if earlier.queued_tokens and later.queued_tokens:
            busy_s += elapsed_s
            tokens += computed
    decay = 0.5 ** (elapsed_s / HALF_LIFE_S)
    memory = replace(memory, all_s=decay * memory.all_s + elapsed_s, computed=decay * memory.computed + all_tokens)
    if not busy_s:
        return memory
    decay = 0.5 ** (busy_s / HALF_LIFE_S)
    return replace(memory, busy_s=decay * memory.busy_s + busy_s, tokens=decay * memory.tokens + tokens)


def predicted_ttft_s(memory: Memory, loads: Sequence[Load], num_replicas: int) -> float:
    """Returns the time that a request which comes now would wait, if the queues were spread evenly."""
    oldest_s = max((load.oldest_s for load in loads), default=0.0)
    queued = sum(load.queued_tokens for load in loads)
    if not queued or not memory.tokens:
        return oldest_s
    rate = memory.tokens / memory.busy_s
    return max(oldest_s, queued / (rate * num_replicas))


def decide(
    scaling: Scaling, memory: Memory, loads: Sequence[Load], num_serving: int, num_ready: int, now_s: float
) -> tuple[int, Memory]:
    """Returns the number of replicas that should serve, and what to remember.

    loads        of all schedulers that answer
    num_serving  replicas that are wanted now
    num_ready    those of them that serve already
    """
    if num_serving < scaling.min_replicas or num_serving > scaling.max_replicas:
        number = min(max(num_serving, scaling.min_replicas), scaling.max_replicas)
        return number, replace(memory, high_since_s=None, low_since_s=None)
    predicted_s = predicted_ttft_s(memory, loads, max(1, num_ready))
    memory = replace(memory, predicted_s=predicted_s)
    if num_ready < num_serving:
        return num_serving, replace(memory, high_since_s=None, low_since_s=None)
    is_high = predicted_s > scaling.target_ttft_s
    with_one_less_s = predicted_s * num_serving / max(1, num_serving - 1)
    is_low = with_one_less_s < SHRINK_BELOW * scaling.target_ttft_s and _could_do(memory, num_serving - 1)
    high_since_s = (now_s if memory.high_since_s is None else memory.high_since_s) if is_high else None
    low_since_s = (now_s if memory.low_since_s is None else memory.low_since_s) if is_low else None
    number = num_serving
    if high_since_s is not None and now_s - high_since_s >= GROW_AFTER_S:
        excess = predicted_s / scaling.target_ttft_s
        number = min(scaling.max_replicas, 2 * num_serving, max(num_serving + 1, int(num_serving * excess)))
        high_since_s = None
    elif low_since_s is not None and now_s - low_since_s >= SHRINK_AFTER_S:
        number = max(scaling.min_replicas, num_serving - 1)
        low_since_s = None
    return number, replace(memory, high_since_s=high_since_s, low_since_s=low_since_s)


def _could_do(memory: Memory, num_replicas: int) -> bool:
    """Returns whether so many replicas could compute what all compute now. True if no replica ever had a queue."""
    if not memory.busy_s or not memory.all_s:
        return True
    return memory.computed / memory.all_s <= MAX_USE * num_replicas * memory.tokens / memory.busy_s
