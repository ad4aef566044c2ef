"""Sampling parameters and end conditions of all slots, one array for each parameter."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self, get_type_hints

import numpy as np
from numpy.typing import NDArray

from executor.plans.plan import EndReason, Floats, Ints, SequenceParams
from executor.slots.logit_changes import LogitChanges
from executor.slots.token_sets import TokenSets
from executor.slots.uniforms import uniforms


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The parameters by which tokens are drawn, [n] each: the one declaration for slots, rows and devices.

    A column has the name of its parameter in `SequenceParams`. Columns are in the order in which `kernels.cpu.sample`
    takes them, and each has a `kernels.triton.StateField` of the same name.

    temperature  0: greedy              top_k  0: all tokens
    top_p        1: all tokens          min_p  0: all tokens
    """

    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats

    @classmethod
    def zeros(cls, length: int) -> Self:
        arrays: list[Any] = [np.zeros(length, dtype=dtype) for dtype in _DTYPES.values()]
        return cls(*arrays)

    @classmethod
    def of(cls, params: Iterable[SequenceParams], vocab_size: int) -> Self:
        """Returns one entry for each of the parameters. A top_k that keeps the whole vocabulary becomes 0."""
        kept = [each if each.top_k < vocab_size else replace(each, top_k=0) for each in params]
        arrays: list[Any] = [np.array([getattr(each, name) for each in kept], dtype) for name, dtype in _DTYPES.items()]
        return cls(*arrays)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Returns the columns, Floats or Ints, in order."""
        return tuple(getattr(self, name) for name in _DTYPES)

    @property
    def named(self) -> Iterator[tuple[str, Floats | Ints]]:
        """Yields the name and the array of each column."""
        return zip(_DTYPES, self.arrays, strict=True)

    def take(self, places: Ints) -> "SamplingColumns":
        return SamplingColumns(*(array[places] for array in self.arrays))


_DTYPES = {
    name: np.dtype(np.int32 if kind == Ints else np.float32) for name, kind in get_type_hints(SamplingColumns).items()
}


@dataclass(frozen=True, slots=True)
class Draw:
    """Everything needed to sample one token from each row of logits.

    params        [num_rows]
    uniforms      [num_rows] in [0, 1), one for each row; any numbers if all rows are greedy
    banned        (row, token ids) whose logits are -inf
    changes       changes to the logits of some rows, made before any token is banned
    """

    params: SamplingColumns
    uniforms: Floats
    banned: tuple[tuple[int, Ints], ...] = ()
    changes: LogitChanges | None = None

    @property
    def is_greedy(self) -> bool:
        return not self.params.temperature.any()

    @property
    def is_plain_greedy(self) -> bool:
        """True if each row takes its largest logit, and no logit is banned."""
        return self.is_greedy and not self.banned

    def unchanged(self, rows: Ints) -> "Draw":
        """Returns how to sample these rows, ascending, whose logits have been changed already."""
        places = {row: place for place, row in enumerate(rows.tolist())} if self.banned else {}
        return Draw(
            params=self.params.take(rows),
            uniforms=self.uniforms[rows],
            banned=tuple((places[row], token_ids) for row, token_ids in self.banned if row in places),
        )


class SamplingTable:
    """The sampling parameters and end conditions of each slot. Entries of empty slots are stale and never read."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._params = SamplingColumns.zeros(max_num_seqs)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._max_total_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self._min_total_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._eos_ids = TokenSets(max_num_seqs)
        self._stop_ids = TokenSets(max_num_seqs)

    def set(self, slot: int, params: SequenceParams) -> None:
        own = SamplingColumns.of((params,), self._vocab_size)
        for array, value in zip(self._params.arrays, own.arrays, strict=True):
            array[slot] = value[0]
        self._seeds[slot] = params.seed
        self._max_total_tokens[slot] = params.max_total_tokens
        self._min_total_tokens[slot] = params.min_total_tokens
        self._eos_ids.set(slot, params.eos_token_ids)
        self._stop_ids.set(slot, params.stop_token_ids)

    def copy_slots(self, sources: Ints, destinations: Ints) -> None:
        """Copies all slots at once: a slot may be both a source and a destination."""
        for array in self._params.arrays:
            array[destinations] = array[sources]
        self._seeds[destinations] = self._seeds[sources]
        self._max_total_tokens[destinations] = self._max_total_tokens[sources]
        self._min_total_tokens[destinations] = self._min_total_tokens[sources]
        self._eos_ids.copy_rows(sources, destinations)
        self._stop_ids.copy_rows(sources, destinations)

    def set_seeds(self, slots: Ints, seeds: NDArray[np.uint64]) -> None:
        self._seeds[slots] = seeds

    def clear(self) -> None:
        """Releases the memory that grows with the sets of token ids."""
        self._eos_ids.clear()
        self._stop_ids.clear()

    def draw(self, slots: Ints, num_tokens: Ints, changes: LogitChanges | None = None) -> Draw:
        """Returns how to sample the next token of each slot, at position `num_tokens` of its sequence."""
        params = self._params.take(slots)
        too_early = np.flatnonzero(num_tokens < self._min_total_tokens[slots]).tolist()
        has_draws = params.temperature.any()
        return Draw(
            params=params,
            uniforms=uniforms(self._seeds[slots], num_tokens) if has_draws else params.temperature,
            banned=tuple((row, self._end_ids(int(slots[row]))) for row in too_early),
            changes=changes,
        )

    def end_reasons(self, slots: Ints, token_ids: Ints, num_tokens: Ints) -> NDArray[np.uint8]:
        """Returns the EndReason of sequences that have just got `token_ids` as the last of `num_tokens`.

        EOS comes before stop ids, and stop ids come before length.
        """
        reasons = np.zeros(len(slots), dtype=np.uint8)
        reasons[num_tokens >= self._max_total_tokens[slots]] = EndReason.LENGTH
        reasons[self._stop_ids.contain(slots, token_ids)] = EndReason.STOP
        reasons[self._eos_ids.contain(slots, token_ids)] = EndReason.EOS
        return reasons

    def _end_ids(self, slot: int) -> Ints:
        return np.concatenate((self._eos_ids.get(slot), self._stop_ids.get(slot)))
