"""Converts text to token ids with the checkpoint's tokenizer, without executing code from the checkpoint.

The `tokenizers` library releases the interpreter lock while it encodes. Short texts are encoded at once, because a
thread would take longer; long texts are encoded in a thread, so that the event loop continues. Tenants take turns at
the threads, large texts leave one thread to others, and the amount of text that waits is bounded. A text that has too
many tokens is refused before it is encoded if its length proves it (`scheduler.text.text_bound`), else afterwards.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TypeVar

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from scheduler.core.errors import CapacityExceeded, InvalidRequest
from scheduler.text.checkpoint import Checkpoint, CheckpointError
from scheduler.text.control_tokens import ChatEncoder, ControlToken
from scheduler.text.detokenizer import Detokenizer, Vocabulary
from scheduler.text.text_bound import TextBound
from scheduler.text.turns import Turns

MAX_INLINE_SIZE = 2048
"""Characters or token ids that take about 0.2 ms; the round trip to a thread takes 0.1 ms."""

IDS_AT_ONCE = 1 << 16
"""Token ids that are made in one call, which takes a millisecond."""

MAX_TOKENS_OF_TEXT = 1 << 19
"""Tokens that a text may have; longer prompts have to come as ids. The library divides an encoding in one call, which
keeps the interpreter lock for 7 ms if it has as many."""

NUM_THREADS = 2


T = TypeVar("T")
Encode = Callable[[FastTokenizer, str, int | None], list[int]]


class Tokenizer:
    """The tokenizer of one checkpoint. Used from one event loop."""

    def __init__(self, tokenizer: FastTokenizer, special_tokens: dict[str, str] | None = None) -> None:
        # Some checkpoints were saved with the truncation or padding that was used in training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.special_tokens = special_tokens or {}
        """Special tokens by role: {"bos_token": "<s>", …}."""
        self.special_token_ids = frozenset(
            i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer)
        self._whole_vocabulary = Vocabulary(tokenizer, shows_special_tokens=True)
        self._chat = ChatEncoder(tokenizer)
        self._bound, self._chat_bound = TextBound(tokenizer), TextBound(self._chat.tokenizer)
        self._turns = Turns.of_texts(NUM_THREADS)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="quire-tokenize")

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> "Tokenizer":
        """Reads tokenizer.json, and tokens from tokenizer_config.json. Raises CheckpointError for unusable files."""
        text = checkpoint.text("tokenizer.json")
        if text is None:
            raise CheckpointError(
                f"{checkpoint.directory} has no tokenizer.json (older formats such as tokenizer.model are not read)"
            )
        try:
            tokenizer = FastTokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{checkpoint.directory / 'tokenizer.json'} is not a tokenizer: {error}") from error
        _add_listed_tokens(tokenizer, checkpoint)
        return cls(tokenizer, _special_tokens(checkpoint))

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's EOS token, or None if it names none."""
        token = self.special_tokens.get("eos_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def control_tokens(self) -> tuple[ControlToken, ...]:
        """The tokens that clients cannot write in chats, for the renderer."""
        return self._chat.tokens

    async def encode(
        self, text: str, *, max_tokens: int | None = None, tenant: str = "default", add_special_tokens: bool = True
    ) -> list[int]:
        """Returns the token ids of a valid Unicode text, with the special tokens of the checkpoint's post-processor.

        Control tokens in the text are recognised. Raises CapacityExceeded if there are more than `max_tokens`,
        QueueFull if too much text waits already, InvalidRequest if the vocabulary cannot express the text or if it has
        more than MAX_TOKENS_OF_TEXT tokens.
        """
        _check_fewest(self._bound.fewest_tokens(text), max_tokens)
        encode = partial(_encode, add_special_tokens=add_special_tokens)
        return await self._run(encode, self._tokenizer, text, max_tokens, tenant)

    async def encode_chat(self, rendered: str, *, max_tokens: int | None = None, tenant: str = "default") -> list[int]:
        """Returns the token ids of a chat that `ChatRenderer` has rendered with this tokenizer's `control_tokens`.

        Control tokens come from their stand-ins only. Raises the errors of `encode`.
        """
        _check_fewest(self._chat_bound.fewest_tokens(rendered), max_tokens)
        return await self._run(self._encode_chat, self._chat.tokenizer, rendered, max_tokens, tenant)

    async def decode(self, token_ids: list[int], *, tenant: str = "default") -> str:
        """Returns the text of token ids, special tokens included. Raises QueueFull if too much text waits already."""
        decode = partial(self._tokenizer.decode, token_ids, skip_special_tokens=False)
        text: str = await self.in_turn(decode, len(token_ids), tenant)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """See `Vocabulary.token_bytes`."""
        return self._vocabulary.token_bytes(token_id)

    def detokenizer(self, *, continues_text: bool = False, shows_special_tokens: bool = False) -> Detokenizer:
        """Returns a detokenizer for a new output; see `Vocabulary.detokenizer`."""
        vocabulary = self._whole_vocabulary if shows_special_tokens else self._vocabulary
        return vocabulary.detokenizer(continues_text=continues_text)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self, encode: Encode, tokenizer: FastTokenizer, text: str, max_tokens: int | None, tenant: str
    ) -> list[int]:
        return await self.in_turn(partial(encode, tokenizer, text, max_tokens), len(text), tenant)

    async def in_turn(self, work: Callable[[], T], size: int, tenant: str) -> T:
        """Returns what `work` returns: at once if it is small, else in a thread when it is the tenant's turn.

        size  the characters or token ids that it handles

        Raises QueueFull if too much waits already.
        """
        if size <= MAX_INLINE_SIZE:
            return work()
        turn = await self._turns.take(tenant, size)
        done = asyncio.wrap_future(self._threads.submit(work))
        # If the caller is cancelled, the thread keeps the text and its turn until it is done.
        done.add_done_callback(lambda _: turn.end())
        return await asyncio.shield(done)

    def _encode_chat(self, tokenizer: FastTokenizer, rendered: str, max_tokens: int | None) -> list[int]:
        return self._chat.checkpoint_ids(_encode(tokenizer, rendered, max_tokens, add_special_tokens=False))


def _encode(
    tokenizer: FastTokenizer, text: str, max_tokens: int | None, *, add_special_tokens: bool = True
) -> list[int]:
    # The library's only way to encode that keeps no offsets and releases the interpreter lock.
    try:
        encoding = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except Exception as error:  # the library raises bare Exception, for example if there is no [UNK] token
        raise InvalidRequest({"prompt": f"cannot be tokenised: {error}"}) from error
    # A list of ids is made without releasing the lock. So the length is checked first, and a long list is made in
    # parts, between which the event loop runs.
    if max_tokens is not None and len(encoding) > max_tokens:
        raise _capacity_exceeded(str(len(encoding)), max_tokens)
    if len(encoding) > MAX_TOKENS_OF_TEXT:
        problem = f"has {len(encoding)} tokens, a text may have {MAX_TOKENS_OF_TEXT}: send a longer prompt as token ids"
        raise InvalidRequest({"prompt": problem})
    if len(encoding) <= IDS_AT_ONCE:
        ids: list[int] = encoding.ids
        return ids
    encoding.truncate(IDS_AT_ONCE)
    return list(chain.from_iterable(part.ids for part in (encoding, *encoding.overflowing)))


def _check_fewest(num_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        raise _capacity_exceeded(f"at least {num_tokens}", max_tokens)


def _capacity_exceeded(num_tokens: str, max_tokens: int) -> CapacityExceeded:
    return CapacityExceeded(f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum")


def _add_listed_tokens(tokenizer: FastTokenizer, checkpoint: Checkpoint) -> None:
    """Adds the tokens that tokenizer_config.json lists and tokenizer.json lacks, as transformers does."""
    listed = checkpoint.json_object("tokenizer_config.json").get("added_tokens_decoder") or {}
    try:
        tokens = {int(token_id): AddedToken(**fields) for token_id, fields in listed.items()}
    except (AttributeError, TypeError, ValueError) as error:
        path = checkpoint.directory / "tokenizer_config.json"
        raise CheckpointError(f"{path}: added_tokens_decoder does not describe tokens: {error}") from error
    for token_id, token in sorted(tokens.items()):
        if tokenizer.token_to_id(token.content) is not None:
            continue
        tokenizer.add_tokens([token])
        if (found := tokenizer.token_to_id(token.content)) != token_id:
            raise CheckpointError(
                f"{checkpoint.directory / 'tokenizer.json'} lacks the token {token.content!r}, which would get the id"
                f" {found} instead of {token_id} as in tokenizer_config.json"
            )


def _special_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the special tokens by role, from the file that transformers goes by.

    Without added_tokens_decoder, which older checkpoints lack, special_tokens_map.json counts before
    tokenizer_config.json; with it, it is not read. A checkpoint may have roles of its own, which its template knows.
    """
    named = checkpoint.json_object("tokenizer_config.json")
    if "added_tokens_decoder" not in named:
        named |= checkpoint.json_object("special_tokens_map.json")
    if isinstance(own := named.get("extra_special_tokens"), dict):
        named = own | named
    tokens = {}
    for role, token in named.items():
        if isinstance(token, dict):  # an added token with its flags
            token = token.get("content")
        if isinstance(token, str) and role.endswith("_token"):
            tokens[role] = token
    return tokens
