"""Takes snapshots of the engine as plain data, from which frames are made."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from scheduler.core.inspect.views import SequenceView, num_waiting_prompt_tokens, num_waiting_sequences, sequence_view
from scheduler.live.plan_log import sequence_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from scheduler.core import KVUsage, Scheduler
    from scheduler.engine.engine import Engine
    from scheduler.engine.model_description import ModelDescription

CACHED = -1
"""Replaces the ref count of an unreferenced block that can be found by its prefix. A free block has 0."""

MAX_SHOWN_WAITING = 12


@dataclass(frozen=True, slots=True)
class ContiguousUsage:
    """The memory that the running sequences would take in a server without a paged cache.

    Each of them would reserve `max_model_len` consecutive token slots and share none of them.

    num_token_slots        token slots reserved
    num_used_token_slots   token slots of these that hold a token
    num_fitting_sequences  sequences that the pool could run at once
    """

    num_token_slots: int
    num_used_token_slots: int
    num_fitting_sequences: int

    @classmethod
    def of(cls, sequences: Iterable[SequenceView], max_model_len: int, num_pool_token_slots: int) -> ContiguousUsage:
        num_tokens = [min(sequence.num_tokens, max_model_len) for sequence in sequences]
        return cls(len(num_tokens) * max_model_len, sum(num_tokens), num_pool_token_slots // max_model_len)


@dataclass(frozen=True, slots=True)
class WaitingSequence:
    key: str
    num_tokens: int
    is_preempted: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the engine. Before the first executor there is no model, and everything else is empty.

    blocks     by block id (0 is the null block): ref count, or 0 for a free and CACHED for a cached block
    sequences  the running sequences, by key
    waiting    the head of the queue
    """

    state: str
    model: ModelDescription | None
    blocks: NDArray[np.int32]
    sequences: dict[str, SequenceView]
    waiting: list[WaitingSequence]
    num_waiting: int
    num_waiting_prompt_tokens: int
    oldest_waiting_s: float
    usage: KVUsage | None
    contiguous: ContiguousUsage
    num_steps: int
    num_generated_tokens: int
    num_preemptions: int
    num_cow_copies: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int


def take_snapshot(engine: Engine) -> Snapshot:
    """Takes a snapshot, in time proportional to the pool and to the blocks of the running sequences.

    Measured: 0.2 ms for 1,024 blocks and 16 sequences, 6 ms for 100,000 blocks and 256 sequences.
    """
    core = engine.core
    if core is None:
        nothing = np.zeros(0, np.int32)
        return Snapshot(engine.readiness, None, nothing, {}, [], 0, 0, 0.0, None, ContiguousUsage(0, 0, 0), *[0] * 6)
    model, counters, queue = engine.description, core.state.counters, core.state.waiting
    sequences = {sequence_key(sequence): sequence_view(sequence) for sequence in core.state.batch.running}
    waiting = [
        WaitingSequence(sequence_key(sequence), sequence.num_tokens, sequence.num_preemptions > 0)
        for sequence in islice(chain(queue, queue.paused), MAX_SHOWN_WAITING)
    ]
    num_pool_token_slots = core.state.cache.pool.num_usable_blocks * core.state.cache.block_size
    return Snapshot(
        state=engine.readiness,
        model=model,
        blocks=_block_values(core),
        sequences=sequences,
        waiting=waiting,
        num_waiting=num_waiting_sequences(core),
        num_waiting_prompt_tokens=num_waiting_prompt_tokens(core),
        oldest_waiting_s=round(engine.oldest_waiting_s, 1),
        usage=engine.kv_usage(),
        contiguous=ContiguousUsage.of(sequences.values(), model.max_model_len, num_pool_token_slots),
        num_steps=counters.num_steps,
        num_generated_tokens=counters.num_generated_tokens,
        num_preemptions=counters.num_preemptions,
        num_cow_copies=counters.num_cow_copies,
        num_prefix_queried_tokens=counters.num_prefix_queried_tokens,
        num_prefix_hit_tokens=counters.num_prefix_hit_tokens,
    )


def fingerprint(engine: Engine) -> tuple[object, ...]:
    """Returns a value that stays equal while nothing changes that a page would show. Takes almost no time."""
    core = engine.core
    if core is None:
        return (engine.readiness,)
    return (
        engine.readiness,
        core.state.epoch,
        core.state.step_id,
        core.num_in_flight,
        int(engine.oldest_waiting_s),
        num_waiting_sequences(core),
        core.num_unfinished_requests,
        core.state.cache.pool.num_free_blocks,
        len(core.state.cache.index),
    )


def _block_values(core: Scheduler) -> NDArray[np.int32]:
    values = np.array(core.state.cache.pool.ref_counts, dtype=np.int32)
    cached = np.array([block for _, block in core.state.cache.index.items()], dtype=np.int64)
    values[cached[values[cached] == 0]] = CACHED
    return values
