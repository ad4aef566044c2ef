"""Converts text to token ids with the checkpoint's tokenizer, without executing code from the checkpoint.

The `tokenizers` library releases the interpreter lock while it encodes. Short texts are encoded at once, because a
thread would take longer; long texts are encoded in a thread, so that the event loop continues. The amount of text that
waits for a thread is bounded.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from tokenizers import Tokenizer as FastTokenizer

from scheduler.core.errors import InvalidRequest, QueueFull
from scheduler.text.checkpoint import Checkpoint, CheckpointError
from scheduler.text.detokenizer import Detokenizer, Vocabulary

MAX_INLINE_CHARACTERS = 2048  # take about 0.2 ms; the round trip to a thread takes 0.1 ms
NUM_THREADS = 2

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerLimits:
    """Limits of a tokenizer.

    max_pending_characters   characters of all texts in threads or waiting for one; more are refused with QueueFull
    """

    max_pending_characters: int = 64 * 2**20


class Tokenizer:
    """The tokenizer of one checkpoint. Used from one event loop."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        special_tokens: dict[str, str] | None = None,
        limits: TokenizerLimits | None = None,
    ) -> None:
        # Some checkpoints were saved with the truncation or padding that was used in training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.special_tokens = special_tokens or {}
        """Special tokens by role: {"bos_token": "<s>", …}."""
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer)
        self._limits = limits or TokenizerLimits()
        self._num_pending_characters = 0
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="quire-tokenize")

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> "Tokenizer":
        """Reads tokenizer.json. Raises CheckpointError if it is missing or unreadable."""
        text = checkpoint.text("tokenizer.json")
        if text is None:
            raise CheckpointError(
                f"{checkpoint.directory} has no tokenizer.json (older formats such as tokenizer.model are not read)"
            )
        try:
            tokenizer = FastTokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{checkpoint.directory / 'tokenizer.json'} is not a tokenizer: {error}") from error
        return cls(tokenizer, _special_tokens(checkpoint))

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's EOS token, or None if it names none."""
        token = self.special_tokens.get("eos_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a valid Unicode text, with the special tokens of the checkpoint's post-processor.

        Raises QueueFull if too much text waits already, InvalidRequest if the vocabulary cannot express the text.
        """
        if len(text) <= MAX_INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        if self._num_pending_characters and (
            self._num_pending_characters + len(text) > self._limits.max_pending_characters
        ):
            raise QueueFull("too much text is waiting to be tokenised")
        self._add_pending(len(text))
        work = self._threads.submit(self._encode, text, add_special_tokens)
        # A callback of the thread's own future: if the caller is cancelled, the thread keeps the text until it is done.
        work.add_done_callback(lambda _: self._add_pending(-len(text)))
        return await asyncio.wrap_future(work)

    def detokenizer(self, *, continues_text: bool = False) -> Detokenizer:
        """Returns a detokenizer for a new output; see `Vocabulary.detokenizer`."""
        return self._vocabulary.detokenizer(continues_text=continues_text)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The library's only way to encode that keeps no offsets and releases the interpreter lock.
        try:
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except Exception as error:  # the library raises bare Exception, for example if there is no [UNK] token
            raise InvalidRequest({"prompt": f"cannot be tokenised: {error}"}) from error
        return list(encoding.ids)

    def _add_pending(self, num_characters: int) -> None:
        with self._lock:  # threads call this
            self._num_pending_characters += num_characters


def _special_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    named = checkpoint.json_object("special_tokens_map.json") | checkpoint.json_object("tokenizer_config.json")
    tokens = {}
    for role in SPECIAL_TOKENS:
        token = named.get(role)
        if isinstance(token, dict):  # an added token with its flags
            token = token.get("content")
        if isinstance(token, str):
            tokens[role] = token
    return tokens
