"""Log-probabilities in the forms of chat completions, of completions, and of vLLM's `prompt_logprobs`."""

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any

from quire.v1 import generation_pb2 as pb

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot express; OpenAI's API and vLLM's use the same number."""


def token_text(data: bytes) -> str:
    """Returns the text of a token. Parts of characters become "bytes:\\xe2\\x80", as in OpenAI's API."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokens: Iterable[pb.TokenLogprobs]) -> list[dict[str, Any]]:
    """Returns the entries of `logprobs.content` of a chat completion."""
    return [_entry(each.chosen) | {"top_logprobs": [_entry(top) for top in each.top]} for each in tokens]


def prompt_logprobs(tokens: Iterable[pb.TokenLogprobs], num_top: int | None = None) -> list[dict[str, Any] | None]:
    """Returns vLLM's `prompt_logprobs`: null for the first token, then an object by token id for each.

    num_top  most probable tokens of each, beside the token itself; None: all that are there
    """
    entries = [
        {str(token.token_id): _vllm_entry(token) for token in (each.chosen, *each.top[:num_top])} for each in tokens
    ]
    return [None, *entries]


class LegacyLogprobs:
    """The `logprobs` of one choice of a completion: four lists with an entry for each token.

    num_top  most probable tokens of each, beside the token itself; None: all that are there
    """

    def __init__(self, num_top: int | None = None) -> None:
        self._num_top = num_top
        self._offset = 0  # below 0 within characters of tokens that the text does not have
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._start()

    def _start(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, text: str, first_token: str, others: Sequence[pb.TokenLogprobs]) -> None:
        """Adds the tokens of a prompt, with which the text of the choice begins.

        first_token  text of the first token, which has no log-probability; `text` lacks a token that the tokenizer adds

            <s>│ Hello│ world     tokens
                 Hello│ world     text: sentencepiece leaves the first space out
        """
        shown, rest = text.encode(), b"".join(each.chosen.bytes for each in others)
        if shown.endswith(rest):
            first = shown[: len(shown) - len(rest)]
            if "\ufffd" in first_token and first:  # a part of a character
                first_token = token_text(first)
            self._add(first_token, None, None, len(self._utf8.decode(first)))
        elif rest.lstrip(b" ") == shown.lstrip(b" "):
            self._add(first_token, None, None, len(shown) - len(rest))
        else:
            self._add(first_token, None, None, len(first_token) if text.startswith(first_token) else 0)
        self.add(others)
        self._offset = len(text)
        self._utf8.reset()

    def add(self, tokens: Iterable[pb.TokenLogprobs]) -> None:
        for each in tokens:
            top = {token_text(token.bytes): _finite(token.logprob) for token in each.top[: self._num_top]}
            text = token_text(each.chosen.bytes)
            top.setdefault(text, _finite(each.chosen.logprob))
            num_characters = len(self._utf8.decode(each.chosen.bytes))  # a part of a character has none yet
            self._add(text, _finite(each.chosen.logprob), top, num_characters)

    def take(self) -> dict[str, Any]:
        """Returns the entries that were added since the last call."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._start()
        return taken

    def _add(self, text: str, logprob: float | None, top: dict[str, float] | None, num_characters: int) -> None:
        self._tokens.append(text)
        self._logprobs.append(logprob)
        self._top.append(top)
        self._offsets.append(max(0, self._offset))
        self._offset += num_characters


def _entry(token: pb.TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(token.bytes), "logprob": _finite(token.logprob), "bytes": list(token.bytes)}


def _vllm_entry(token: pb.TokenLogprob) -> dict[str, Any]:
    return {"logprob": _finite(token.logprob), "rank": token.rank, "decoded_token": token_text(token.bytes)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
