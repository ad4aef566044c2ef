"""Compiles grammars and follows them in threads of its own, and keeps the compiled ones for the next request.

A compiled grammar is never changed: sequences copy it when they have their first token. Compiling and following have
separate threads, so that a large grammar does not delay the masks of others.
"""

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from executor.grammars.followed import FollowedGrammar, GrammarKey, Vocabulary, begin, follow
from executor.grammars.masks import GrammarCounts
from executor.grammars.workers import FOLLOW_LIMIT_S, Pending, Workers
from executor.plans.plan import SequenceParams, StepPlan
from quire.grammars import MAX_GRAMMAR_BYTES, grammar_tokenizer

_log = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 64
"""Number of compiled grammars that are kept."""

MAX_CACHED_CHARACTERS = 16 * MAX_GRAMMAR_BYTES
"""Length of all their texts, and of those of deferred states: the size of a compiled grammar grows with its text."""

_MAX_VOCABULARIES = 4
"""Sets of EOS ids with a vocabulary of their own. Nearly all requests for a model have the same."""

_MAX_DEFERRED = 256
"""States that were late and are kept for the sequences that have to come back for them."""

_MAX_COMPILING = 2
_MAX_FOLLOWING = 8


class Grammars:
    """The grammars of one vocabulary. Any thread may call `start` and `expect`."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        """Prepares the vocabulary with these EOS ids. Raises ValueError if llguidance cannot use this tokenizer."""
        self.counts = GrammarCounts()
        self.vocab_size = vocab_size
        self._tokenizer_json = tokenizer_json
        self._vocabularies: OrderedDict[tuple[int, ...], Vocabulary] = OrderedDict()
        self._started: OrderedDict[GrammarKey, Pending] = OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()
        self._preparing = threading.Lock()
        self._num_deferred_characters = 0
        self._deferred: OrderedDict[tuple[GrammarKey, tuple[int, ...]], Pending] = OrderedDict()
        failed = FollowedGrammar.failed(vocab_size)
        num_threads = min(_MAX_FOLLOWING, len(os.sched_getaffinity(0)))
        self._compiling = Workers(_MAX_COMPILING, "compile-grammar", failed)
        self._following = Workers(num_threads, "follow-grammar", failed, FOLLOW_LIMIT_S)
        self._vocabulary(tuple(sorted({*eos_token_ids})))

    def start(self, key: GrammarKey) -> Pending:
        """Returns the state before any output, which is compiled unless it was lately."""
        with self._lock:
            if (known := self._started.get(key)) is not None:
                if not known.is_spent:
                    self._started.move_to_end(key)
                    return known
                del self._started[key]
                self._num_characters -= len(key[0])
            self.counts.num_compiled += 1
            started = self._compiling.submit(partial(self._begin, *key))
            self._started[key] = started
            self._num_characters += len(key[0])
            self._evict()
            return started

    def expect(self, plan: StepPlan) -> None:
        """Begins to compile the grammars of a plan that has arrived, and has to be neither valid nor run."""
        for admission in plan.admissions:
            if admission.params.grammar:
                self.start(key_of(admission.params))

    def deferred(self, key: GrammarKey, output: tuple[int, ...]) -> Pending | None:
        """Removes and returns the state after an output for which a step did not wait; None if there is none of use."""
        pending = self._deferred.pop((key, output), None)
        if pending is None:
            return None
        self._num_deferred_characters -= len(key[0])
        return None if pending.is_spent else pending

    def keep_deferred(self, key: GrammarKey, output: tuple[int, ...], pending: Pending) -> None:
        """Keeps a state for which a step does not wait. Called by the device thread alone, like `deferred`."""
        self.counts.num_deferred += 1
        if (key, output) not in self._deferred:
            self._num_deferred_characters += len(key[0])
        self._deferred[key, output] = pending
        while len(self._deferred) > _MAX_DEFERRED or self._num_deferred_characters > MAX_CACHED_CHARACTERS:
            ((grammar, _), _), _ = self._deferred.popitem(last=False)
            self._num_deferred_characters -= len(grammar)

    def replay(self, start: Pending, output: Sequence[int]) -> Pending:
        """Returns the state after an output that was computed before."""

        def replayed() -> FollowedGrammar:
            return follow(start.result(), output, is_own=False)

        # The threads take their work in order, so `start` is done or under way when this one waits for it.
        return self._compiling.submit(replayed, start)

    def after(self, before: Pending, token_id: int, *, is_own: bool) -> Pending:
        """Returns the state after one more token, which is computed once `begin` is called with it.

        is_own  nothing else uses the state before
        """
        work = partial(follow, before.result(), (token_id,), is_own=is_own)
        return Pending(self._following, work, before.origin)

    def begin(self, after: Sequence[Pending]) -> None:
        """Lets the threads compute states of `after`."""
        self._following.begin(after)

    def _begin(self, grammar: str, eos_token_ids: tuple[int, ...]) -> FollowedGrammar:
        try:
            vocabulary = self._vocabulary(eos_token_ids)
        except ValueError:  # EOS ids that have no logit
            return FollowedGrammar.failed(self.vocab_size)
        return begin(vocabulary, grammar)

    def _vocabulary(self, eos_token_ids: tuple[int, ...]) -> Vocabulary:
        """Returns the vocabulary with these EOS ids. Making one takes up to a second. Raises ValueError."""
        with self._preparing:
            if (known := self._vocabularies.get(eos_token_ids)) is not None:
                self._vocabularies.move_to_end(eos_token_ids)
                return known
            tokenizer = grammar_tokenizer(self._tokenizer_json, self.vocab_size, eos_token_ids)
            made = Vocabulary.of(tokenizer, self.vocab_size, eos_token_ids)
            self._vocabularies[eos_token_ids] = made
            if len(self._vocabularies) > _MAX_VOCABULARIES:
                self._vocabularies.popitem(last=False)
            return made

    def _evict(self) -> None:
        """Drops the grammars that were not used for longest."""
        while len(self._started) > MAX_CACHED_GRAMMARS or self._num_characters > MAX_CACHED_CHARACTERS:
            (grammar, _), _ = self._started.popitem(last=False)
            self._num_characters -= len(grammar)


def key_of(params: SequenceParams) -> GrammarKey:
    """Returns the key of a sequence's grammar."""
    return params.grammar, tuple(sorted({*params.eos_token_ids.tolist()}))


def load_grammars(directory: Path, vocab_size: int) -> Grammars | None:
    """Returns the grammars of a checkpoint; None if it has no tokenizer.json, or one that llguidance cannot use."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Grammars(path.read_text(encoding="utf-8"), vocab_size, _usual_eos(directory, vocab_size))
    except (OSError, ValueError) as error:
        _log.warning("%s: structured output is not offered: %s", path, str(error).splitlines()[0])
        return None


def _usual_eos(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Returns the EOS ids that nearly all requests have, where the scheduler finds them too."""
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((directory / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        ids = found if isinstance(found, list) else [found]
        if known := [each for each in ids if isinstance(each, int) and 0 <= each < vocab_size]:
            return tuple(known)
    return ()
