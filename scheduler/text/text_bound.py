"""Says how many tokens a text has at least, without tokenising it.

Each token covers at most as many characters as the longest one has. This bounds the number of tokens from below if no
step of the tokenizer drops or joins text without a limit, so only tokenizers whose steps are known have a bound:

    normalizer     steps that do not shorten a text, or only by a known factor: NFC and NFKC join at most four
                   characters into one (the longest canonical decomposition in Unicode)
    pre-tokenizer  steps that keep all characters
    model          BPE with a token for each byte, byte-level or as a fallback (also Unigram with the fallback):
                   otherwise one unknown token can stand for a long text

Added tokens that strip white space cover any amount of it, so white space does not count if there is such a token.
"""

import json
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import pre_tokenizers

MAX_COMPOSED = 4
KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
KEEPING_UNLESS_REMOVED = frozenset({"Split", "Punctuation"})
LENGTHENING = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
WHITE_SPACE = [chr(code) for code in range(0x3001) if chr(code).isspace()]


class TextBound:
    """The bound of one tokenizer."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        normalizer = tokenizer.normalizer
        self._strips = any(token.lstrip or token.rstrip for token in added)
        # The characters of a byte-level vocabulary are bytes of the text, which has at least as many as characters.
        lengths = [len(token) for token in tokenizer.get_vocab(with_added_tokens=False)]
        self._longest = max([1, *lengths, *(len(token.content) for token in added)])
        if normalizer is not None:  # some added tokens are compared with normalised text, and normalised themselves
            self._longest = max([self._longest, *(len(normalizer.normalize_str(token.content)) for token in added)])
        self._has_bound = _keeps_all(tokenizer.pre_tokenizer) and _covers_all(tokenizer)
        self._composes = False
        for step in _steps(normalizer, "normalizers"):
            if step["type"] in ("NFC", "NFKC"):
                self._composes = True
            elif not (step["type"] in LENGTHENING or _replaces_by_as_much(step)):
                self._has_bound = False

    def fewest_tokens(self, text: str) -> int:
        """Returns a number of tokens that the text has at least; 0 if there is no bound."""
        if not self._has_bound:
            return 0
        num_characters = len(text)
        if self._strips:
            num_characters -= sum(text.count(space) for space in WHITE_SPACE)
        if self._composes and not text.isascii():
            num_characters //= MAX_COMPOSED
        return -(-num_characters // self._longest)


def _steps(component: Any, key: str) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or a pre-tokenizer, from its serialised state."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    if state["type"] != "Sequence":
        return [state]
    steps = []
    for step in state[key]:
        steps += [step] if step["type"] != "Sequence" else [{"type": "nested"}]
    return steps


def _keeps_all(pre_tokenizer: Any) -> bool:
    return all(
        step["type"] in KEEPING or (step["type"] in KEEPING_UNLESS_REMOVED and step["behavior"] != "Removed")
        for step in _steps(pre_tokenizer, "pretokenizers")
    )


def _replaces_by_as_much(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern", {}).get("String") if step["type"] == "Replace" else None
    return pattern is not None and len(pattern) <= len(step["content"])


def _covers_all(tokenizer: FastTokenizer) -> bool:
    """Returns True if each character becomes at least a part of a token that is no longer than its text."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if any(step["type"] == "ByteLevel" for step in _steps(tokenizer.pre_tokenizer, "pretokenizers")):
        return hasattr(tokenizer.model, "ignore_merges") and vocabulary.keys() >= set(
            pre_tokenizers.ByteLevel.alphabet()
        )
    state = json.loads(tokenizer.model.__getstate__())
    return bool(state.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
