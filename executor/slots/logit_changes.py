"""Changes to logits before a token is chosen, collected into one list for all rows of a step.

They are made in float32 and in this order:

* allowed tokens: all others get -inf
* bias: added to the logits of its tokens
* repetition penalty (Keskar et al., 2019) on tokens in prompt or output: divides positive logits and multiplies
  negative ones
* frequency and presence penalty on tokens in the output: subtracted for each occurrence, and once
* grammar: tokens that the output cannot go on with get -inf
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.grammars.masks import Masks
from executor.plans.plan import Floats, Ints, SequenceParams
from executor.slots.token_counts import TokenCounts

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """The changes to some rows of logits.

    The rows are copied out of the batch. A place is the index of a logit in the flattened copy: row * vocab_size + id.

        rows    │ 3 │ 7 │ 8 │          row numbers in the batch, ascending
        copies  │ 0 │ 1 │ 2 │          row numbers in all other arrays, each of which is ascending

    restricted[r]    rows with a list of allowed tokens, whose places are allowed[a]
    biased[b]        places of tokens with a bias; biases[b] are added there
    seen[s]          places of tokens that the sequences have; how often each is in the output, and the penalties on it
    masks            rows whose output follows a grammar; `changed` waits for their masks
    """

    vocab_size: int
    rows: Ints
    restricted: Places
    allowed: Places
    biased: Places
    biases: Floats
    seen: Places
    num_output: Floats
    repetition: Floats
    frequency: Floats
    presence: Floats
    masks: Masks | None = None

    def changed(self, logits: Tensor) -> Tensor:
        """Returns the changed rows of logits[num_rows, vocab_size] as a new tensor: [len(rows), vocab_size] float32."""
        device = logits.device

        def on_device(array: NDArray[np.int64] | NDArray[np.int32] | NDArray[np.float32]) -> Tensor:
            return torch.from_numpy(array).to(device)

        if device.type == "cpu":  # torch's copy would start all threads for a few rows, and wait until each has a core
            copies = torch.from_numpy(logits.float().numpy()[self.rows])
        else:
            copies = logits.index_select(0, on_device(self.rows)).float()
        numbers = copies.view(-1)
        if self.restricted.size:
            allowed = on_device(self.allowed)
            stay = numbers[allowed]
            copies[on_device(self.restricted)] = -torch.inf
            numbers[allowed] = stay
        if self.biased.size:
            biased = on_device(self.biased)
            numbers[biased] += on_device(self.biases)
        if self.seen.size:
            seen, repetition, num_output = on_device(self.seen), on_device(self.repetition), on_device(self.num_output)
            scores = numbers[seen]
            scores = torch.where(scores < 0, scores * repetition, scores / repetition)
            scores -= on_device(self.frequency) * num_output
            scores -= on_device(self.presence) * (num_output > 0)
            # Extreme penalties and biases overflow. Such a token becomes the most likely one, but not infinite.
            numbers[seen] = scores.clamp(max=torch.finfo(torch.float32).max)
        if self.masks is not None:
            self.masks.forbid(copies)
        return copies

    def parts(self, max_numbers: int) -> Iterator["LogitChanges"]:
        """Yields the same changes in pieces of at least one row and, if possible, at most max_numbers logits."""
        size = max(1, max_numbers // self.vocab_size)
        if len(self.rows) <= size:
            yield self
            return
        for first in range(0, len(self.rows), size):
            yield self._part(first, min(first + size, len(self.rows)))

    def _part(self, first: int, last: int) -> "LogitChanges":
        """Returns the changes to the rows [first, last)."""
        start, stop = first * self.vocab_size, last * self.vocab_size
        allowed, biased, seen = (_between(places, start, stop) for places in (self.allowed, self.biased, self.seen))
        return LogitChanges(
            vocab_size=self.vocab_size,
            rows=self.rows[first:last],
            restricted=self.restricted[_between(self.restricted, first, last)] - first,
            allowed=self.allowed[allowed] - start,
            biased=self.biased[biased] - start,
            biases=self.biases[biased],
            seen=self.seen[seen] - start,
            num_output=self.num_output[seen],
            repetition=self.repetition[seen],
            frequency=self.frequency[seen],
            presence=self.presence[seen],
            masks=None if self.masks is None else self.masks.between(first, last),
        )


def _between(values: Places, start: int, stop: int) -> slice:
    """Returns the slice of ascending values that holds those in [start, stop)."""
    first = int(np.count_nonzero(values < start))
    return slice(first, first + int(np.count_nonzero((values >= start) & (values < stop))))


@dataclass(frozen=True, slots=True)
class _Changes:
    """The changes of one slot. Token ids are int64. allowed: None if all tokens are; counts: None without penalties."""

    allowed: Places | None
    biased: Places
    biases: Floats
    repetition: float
    frequency: float
    presence: float
    counts: TokenCounts | None

    def copy(self) -> "_Changes":
        return self if self.counts is None else replace(self, counts=self.counts.copy())


class ChangeTable:
    """The changes of each slot. Most slots have none, and cost no more than a flag.

    A slot with a grammar has that flag too; its masks are in `executor.grammars.grammar_table`.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._changes_any = np.zeros(max_num_seqs, dtype=np.bool_)
        self._by_slot: dict[int, _Changes] = {}

    def set(self, slot: int, params: SequenceParams, token_ids: Ints) -> None:
        """Sets the changes of a slot. token_ids are all tokens of its sequence, prompt and output."""
        self.drop([slot])
        has_lists = params.allowed_token_ids.size or params.bias_token_ids.size
        has_changes = bool(params.has_penalties or has_lists)
        self._changes_any[slot] = has_changes or bool(params.grammar)
        if not has_changes:
            return
        self._by_slot[slot] = _Changes(
            allowed=np.unique(params.allowed_token_ids).astype(np.int64) if params.allowed_token_ids.size else None,
            biased=params.bias_token_ids.astype(np.int64),
            biases=params.bias_values.astype(np.float32),
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            counts=TokenCounts(token_ids, params.num_prompt_tokens) if params.has_penalties else None,
        )

    def drop(self, slots: list[int]) -> None:
        for slot in slots:
            self._changes_any[slot] = False
            self._by_slot.pop(slot, None)

    def copy_slots(self, sources: Ints, destinations: Ints) -> None:
        """Copies all slots at once: a slot may be both a source and a destination."""
        pairs = zip(sources.tolist(), destinations.tolist(), strict=True)
        copies = {destination: self._by_slot[source].copy() for source, destination in pairs if source in self._by_slot}
        flags = self._changes_any[sources]
        self.drop(destinations.tolist())
        self._by_slot |= copies
        self._changes_any[destinations] = flags

    def count(self, slots: Ints, token_ids: Ints) -> None:
        """Counts tokens that were appended to the sequences of these slots."""
        if not self._by_slot:
            return
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            if (changes := self._by_slot.get(slot)) is not None and changes.counts is not None:
                changes.counts.add(token_id)

    def clear(self) -> None:
        self._changes_any[:] = False
        self._by_slot.clear()

    def change_any(self, slots: Ints) -> bool:
        """Returns whether any of these slots changes its logits."""
        return bool(self._changes_any[slots].any())

    def of(self, slots: Ints) -> LogitChanges | None:
        """Returns the changes to the logits of these slots, one row each; None if there are none."""
        if not self.change_any(slots):
            return None
        rows = np.flatnonzero(self._changes_any[slots]).astype(np.int32)
        by_slot = self._by_slot
        numbered = [(row, by_slot[slot]) for row, slot in enumerate(slots[rows].tolist()) if slot in by_slot]
        if not numbered:
            return _grammars_only(self._vocab_size, rows)
        changes = [own for _, own in numbered]
        restricted = [row for row, own in numbered if own.allowed is not None]
        with_bases = [(row * self._vocab_size, own) for row, own in numbered]
        counted = [(base, own, own.counts) for base, own in with_bases if own.counts is not None]
        lengths = [len(counts.ids) for _, _, counts in counted]

        def spread(values: list[float]) -> Floats:
            return np.repeat(np.array(values, dtype=np.float32), lengths)

        return LogitChanges(
            vocab_size=self._vocab_size,
            rows=rows,
            restricted=np.array(restricted, dtype=np.int64),
            allowed=_joined([base + own.allowed for base, own in with_bases if own.allowed is not None]),
            biased=_joined([base + own.biased for base, own in with_bases]),
            biases=np.concatenate([own.biases for own in changes]),
            seen=_joined([base + counts.ids for base, _, counts in counted]),
            num_output=np.concatenate([counts.num_output for _, _, counts in counted] or [np.zeros(0, np.float32)]),
            repetition=spread([own.repetition for _, own, _ in counted]),
            frequency=spread([own.frequency for _, own, _ in counted]),
            presence=spread([own.presence for _, own, _ in counted]),
        )


def _grammars_only(vocab_size: int, rows: Ints) -> LogitChanges:
    """Returns the changes to rows that have none but masks, which their caller adds."""
    places, numbers = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
    return LogitChanges(
        vocab_size, rows, restricted=places, allowed=places, biased=places, biases=numbers, seen=places,
        num_output=numbers, repetition=numbers, frequency=numbers, presence=numbers,
    )  # fmt: skip


def _joined(places: list[Places]) -> Places:
    return np.concatenate(places) if places else np.zeros(0, dtype=np.int64)
