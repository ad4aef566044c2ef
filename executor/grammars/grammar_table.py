"""The grammars of slots. Most slots have none, and cost no more than a flag.

The state of a slot depends on its grammar and its output alone. Two slots share it after a fork, until each has a token
of its own: what is shared is copied and never changed.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from executor.grammars.grammar_cache import Grammars, key_of
from executor.grammars.masks import GrammarCounts, Masks
from executor.grammars.slot_grammar import Patience, SlotGrammar
from executor.grammars.workers import Pending, refused
from executor.plans.plan import EndReason, Ints, SequenceParams


class GrammarTable:
    """The state of the grammar of each slot."""

    def __init__(self, vocab_size: int, grammars: Grammars | None) -> None:
        """Without grammars, a sequence that has one ends at its first token."""
        self._refused = refused(vocab_size)
        self._grammars = grammars
        self._counts = GrammarCounts() if grammars is None else grammars.counts
        self._by_slot: dict[int, SlotGrammar] = {}
        self._not_begun: list[Pending] = []
        self._patience = Patience()

    def __bool__(self) -> bool:
        return bool(self._by_slot)

    def set(self, slot: int, params: SequenceParams, token_ids: Ints) -> None:
        """Sets the grammar of a slot. token_ids are all tokens of its sequence, prompt and output."""
        self.drop((slot,))
        if not params.grammar:
            return
        if self._grammars is None:
            self._by_slot[slot] = SlotGrammar(self._refused)
            return
        key, output = key_of(params), tuple(token_ids[params.num_prompt_tokens :].tolist())
        deferred = self._grammars.deferred(key, output)
        pending = deferred or self._grammars.start(key)
        if output and deferred is None:
            pending = self._grammars.replay(pending, output)
        has_waited = deferred is not None
        self._by_slot[slot] = SlotGrammar(pending, key, params.num_prompt_tokens, has_waited)

    def begin_step(self) -> None:
        """Lets all masks of the next step share the time for which it waits."""
        self._patience = Patience()

    def drop(self, slots: Ints | tuple[int, ...]) -> None:
        if self._by_slot:
            for slot in slots:
                self._by_slot.pop(int(slot), None)

    def clear(self) -> None:
        self._by_slot.clear()
        self._not_begun.clear()

    def copy_slots(self, sources: Ints, destinations: Ints) -> None:
        """Copies all slots at once: a slot may be both a source and a destination."""
        if not self._by_slot:
            return
        pairs = zip(sources.tolist(), destinations.tolist(), strict=True)
        copies = {to: self._shared(source) for source, to in pairs if source in self._by_slot}
        self.drop(destinations)
        self._by_slot |= copies

    def masks(self, slots: Ints) -> Masks | None:
        """Returns the masks of those slots that have a grammar, by their place in `slots`; None if there are none."""
        if not self._by_slot:
            return None
        own = {row: self._by_slot[slot] for row, slot in enumerate(slots.tolist()) if slot in self._by_slot}
        if not own:
            return None
        return Masks(np.array(list(own), dtype=np.int64), tuple(own.values()), self._counts, self._patience)

    def end_reasons(self, slots: Ints, token_ids: Ints) -> NDArray[np.uint8]:
        """Returns why these slots may not append the tokens that they have sampled; most may.

        They have sampled a token that is forbidden where the grammar cannot be followed: the mask had no token with a
        finite logit, or there was no mask.
        """
        reasons = np.zeros(len(slots), dtype=np.uint8)
        if self._by_slot:
            for row, (slot, token_id) in enumerate(zip(slots.tolist(), token_ids.tolist(), strict=True)):
                if (own := self._by_slot.get(slot)) is None:
                    continue
                if own.is_deferred:
                    reasons[row] = EndReason.DEFERRED
                elif not own.pending.result().allows(token_id):
                    reasons[row] = EndReason.GRAMMAR
        return reasons

    def keep_deferred(self, slot: int, token_ids: Ints) -> None:
        """Keeps the state of a deferred slot until its sequence returns. token_ids: all tokens of the sequence."""
        own = self._by_slot[slot]
        if self._grammars is not None and own.key is not None:
            output = tuple(token_ids[own.num_prompt_tokens :].tolist())
            self._grammars.keep_deferred(own.key, output, own.pending)

    def take_deferred(self, slots: Ints) -> NDArray[np.bool_]:
        """Returns which slots the step has deferred. They keep their states, for which no step waits again."""
        is_deferred = np.zeros(len(slots), dtype=np.bool_)
        for place, slot in enumerate(slots.tolist()):
            own = self._by_slot.get(slot)
            if own is not None and own.is_deferred:
                self._counts.num_deferred += 1
                self._by_slot[slot] = replace(own, is_deferred=False, has_waited=True)
                is_deferred[place] = True
        return is_deferred

    def consume(self, slots: Ints, token_ids: Ints) -> None:
        """Follows tokens that were appended. The masks after them are computed once `begin_masks` is called."""
        if not self._by_slot or self._grammars is None:
            return
        self.begin_masks()  # those that still have to begin: the next states wait for them
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            if (own := self._by_slot.get(slot)) is not None:
                pending = self._grammars.after(own.pending, token_id, is_own=own.is_own)
                self._not_begun.append(pending)
                self._by_slot[slot] = replace(own, pending=pending, has_waited=False, is_own=True)

    def begin_masks(self) -> None:
        """Lets other threads compute the masks after the tokens that were consumed. `masks` needs that.

        Call it before this thread computes without the interpreter, which those threads need.
        """
        if self._not_begun and self._grammars is not None:
            self._grammars.begin(self._not_begun)
            self._not_begun = []

    def _shared(self, slot: int) -> SlotGrammar:
        """Returns the state of a slot for another one to have too."""
        own = self._by_slot[slot]
        own.is_own = False
        return replace(own)
