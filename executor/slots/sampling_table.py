"""Sampling parameters and end conditions of all slots, one array a parameter."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor.plans.plan import EndReason, Floats, Ints, SequenceParams
from executor.slots.logit_changes import LogitChanges
from executor.slots.token_sets import TokenSets
from executor.slots.uniforms import uniforms


@dataclass(frozen=True, slots=True)
class Draw:
    """How to sample one token from each row of logits: arrays [num_rows].

    temperatures  0: greedy                  top_ks   0: all tokens
    top_ps        1: all tokens              min_ps   0: all tokens
    uniforms      in [0, 1), one for each row's choice; anything if all rows are greedy
    banned        (row, token ids) whose logits are -inf
    changes       of the logits of some rows, before any is banned
    """

    temperatures: Floats
    top_ks: Ints
    top_ps: Floats
    min_ps: Floats
    uniforms: Floats
    banned: tuple[tuple[int, Ints], ...] = ()
    changes: LogitChanges | None = None

    @property
    def is_greedy(self) -> bool:
        return not self.temperatures.any()

    def unchanged(self, rows: Ints) -> "Draw":
        """Of these rows, ascending, whose logits have been changed already."""
        places = {row: place for place, row in enumerate(rows.tolist())} if self.banned else {}
        return Draw(
            temperatures=self.temperatures[rows],
            top_ks=self.top_ks[rows],
            top_ps=self.top_ps[rows],
            min_ps=self.min_ps[rows],
            uniforms=self.uniforms[rows],
            banned=tuple((places[row], token_ids) for row, token_ids in self.banned if row in places),
        )


class SamplingTable:
    """What `SequenceParams` says, by slot. Entries of empty slots are stale and never read."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperatures = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_ks = np.zeros(max_num_seqs, dtype=np.int32)
        self._top_ps = np.ones(max_num_seqs, dtype=np.float32)
        self._min_ps = np.zeros(max_num_seqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._max_total_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self._min_total_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._eos_ids = TokenSets(max_num_seqs)
        self._stop_ids = TokenSets(max_num_seqs)

    def set(self, slot: int, params: SequenceParams) -> None:
        self._temperatures[slot] = params.temperature
        self._top_ks[slot] = params.top_k if params.top_k < self._vocab_size else 0
        self._top_ps[slot] = params.top_p
        self._min_ps[slot] = params.min_p
        self._seeds[slot] = params.seed
        self._max_total_tokens[slot] = params.max_total_tokens
        self._min_total_tokens[slot] = params.min_total_tokens
        self._eos_ids.set(slot, params.eos_token_ids)
        self._stop_ids.set(slot, params.stop_token_ids)

    def copy_slots(self, sources: Ints, destinations: Ints) -> None:
        """All at once: a slot may be a source and a destination."""
        for array in (self._temperatures, self._top_ks, self._top_ps, self._min_ps):
            array[destinations] = array[sources]
        self._seeds[destinations] = self._seeds[sources]
        self._max_total_tokens[destinations] = self._max_total_tokens[sources]
        self._min_total_tokens[destinations] = self._min_total_tokens[sources]
        self._eos_ids.copy_rows(sources, destinations)
        self._stop_ids.copy_rows(sources, destinations)

    def set_seeds(self, slots: Ints, seeds: NDArray[np.uint64]) -> None:
        self._seeds[slots] = seeds

    def clear(self) -> None:
        """Forgets what takes memory."""
        self._eos_ids.clear()
        self._stop_ids.clear()

    def draw(self, slots: Ints, num_tokens: Ints, changes: LogitChanges | None = None) -> Draw:
        """For the next token of each slot, which has `num_tokens` now: the new one stands at that position."""
        temperatures = self._temperatures[slots]
        too_early = np.flatnonzero(num_tokens < self._min_total_tokens[slots]).tolist()
        return Draw(
            temperatures=temperatures,
            top_ks=self._top_ks[slots],
            top_ps=self._top_ps[slots],
            min_ps=self._min_ps[slots],
            uniforms=uniforms(self._seeds[slots], num_tokens) if temperatures.any() else temperatures,
            banned=tuple((row, self._end_ids(int(slots[row]))) for row in too_early),
            changes=changes,
        )

    def end_reasons(self, slots: Ints, token_ids: Ints, num_tokens: Ints) -> NDArray[np.uint8]:
        """Of sequences that have just got `token_ids` as the last of `num_tokens`. EOS and stop ids before length."""
        reasons = np.zeros(len(slots), dtype=np.uint8)
        reasons[num_tokens >= self._max_total_tokens[slots]] = EndReason.LENGTH
        reasons[self._stop_ids.contain(slots, token_ids)] = EndReason.STOP
        reasons[self._eos_ids.contain(slots, token_ids)] = EndReason.EOS
        return reasons

    def _end_ids(self, slot: int) -> Ints:
        return np.concatenate((self._eos_ids.get(slot), self._stop_ids.get(slot)))
