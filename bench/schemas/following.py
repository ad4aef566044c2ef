"""Compiles schemas, and follows texts through them token by token, as the executor does.

Times are processor time of the thread, so that other processes are not counted.
"""

import time
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import Tokenizer

from quire.grammars import grammar_tokenizer, matcher
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.grammar_worker import BadGrammar, checked_grammar


@dataclass(frozen=True, slots=True)
class Compiled:
    """A schema after its compilation, which took so many seconds. `problem` says why it is refused."""

    compile_s: float
    grammar: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Followed:
    """A text that was followed as far as its grammar allows.

    is_accepted  all tokens are allowed, and EOS after them
    before       the text up to the token that is refused
    after        the rest
    error        the message of llguidance if it could not go on
    """

    is_accepted: bool
    before: str
    after: str = ""
    error: str = ""


class Vocabulary:
    """The vocabulary of a checkpoint, for tokens and for masks."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Reads it. Raises CheckpointError, and ValueError if llguidance cannot use the tokenizer."""
        source = checkpoint.text("tokenizer.json") or ""
        self._tokenizer = Tokenizer.from_str(source)
        self.size: int = checkpoint.json_object("config.json")["vocab_size"]
        eos = checkpoint.json_object("generation_config.json").get("eos_token_id")
        eos_ids = eos if isinstance(eos, list) else [eos]
        self.llg: LLTokenizer = grammar_tokenizer(source, self.size, [each for each in eos_ids if each is not None])

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, token_ids: list[int]) -> str:
        return self.llg.decode_str(token_ids)


class Follower:
    """Follows texts.

    mask_times_s  the time of each mask that was computed
    num_forced    tokens that masks do not have, because they divide forced bytes in another way than the tokenizer
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._mask = allocate_token_bitmask(1, vocabulary.size)
        self.mask_times_s: list[float] = []
        self.num_forced = 0

    def compile(self, schema: str) -> Compiled:
        began_s = time.thread_time()
        try:
            grammar = checked_grammar(self._vocabulary.llg, "json_schema", schema)
        except BadGrammar as error:
            return Compiled(time.thread_time() - began_s, problem=str(error))
        return Compiled(time.thread_time() - began_s, grammar)

    def matcher(self, grammar: str) -> LLMatcher:
        return matcher(self._vocabulary.llg, grammar)

    def follow(self, start: LLMatcher, text: str) -> Followed:
        """Follows a text without masks. `start` does not change."""
        token_ids = self._vocabulary.tokens(text)
        followed = start.deep_copy()
        num_accepted = followed.try_consume_tokens(token_ids)
        return self._outcome(followed, token_ids, num_accepted)

    def follow_with_masks(self, start: LLMatcher, text: str) -> Followed:
        """Follows a text, and computes and checks the mask before each token and at the end."""
        token_ids = self._vocabulary.tokens(text)
        followed = start.deep_copy()
        for i, token_id in enumerate(token_ids):
            if not (self._allows(followed, token_id) or self._is_forced(followed)) or not followed.consume_token(
                token_id
            ):
                return self._outcome(followed, token_ids, i)
        outcome = self._outcome(followed, token_ids, len(token_ids))
        if outcome.is_accepted and not followed.is_stopped():
            return Followed(any(self._allows(followed, each) for each in self._vocabulary.llg.eos_tokens), text)
        return outcome

    def _is_forced(self, followed: LLMatcher) -> bool:
        """Returns whether the next bytes are forced. A mask then has the first token of one way to divide them."""
        is_forced = bool(followed.compute_ff_bytes())
        self.num_forced += is_forced
        return is_forced

    def _allows(self, followed: LLMatcher, token_id: int) -> bool:
        began_s = time.thread_time()
        fill_next_token_bitmask(followed, self._mask, 0)
        self.mask_times_s.append(time.thread_time() - began_s)
        return bool(self._mask[0, token_id >> 5] >> (token_id & 31) & 1)

    def _outcome(self, followed: LLMatcher, token_ids: list[int], num_accepted: int) -> Followed:
        text = self._vocabulary.text
        before, after = text(token_ids[:num_accepted]), text(token_ids[num_accepted:])
        if not after and followed.is_accepting():
            return Followed(True, before)
        if after and not followed.is_error():
            followed.consume_token(token_ids[num_accepted])  # to learn why it is refused
        return Followed(False, before, after, followed.get_error())
