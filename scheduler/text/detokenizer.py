"""Token ids to text, a few at a time: whole characters only, and never a second look at what was sent.

Decoding a growing output again and again costs time in proportion to its square, and cutting it by string length
breaks characters that span tokens. Almost every checkpoint decodes in one of two ways, though, in which a token's
share of the bytes does not depend on its neighbours; there it is looked up once per vocabulary and fed to an
incremental UTF-8 decoder:

    byte-level     GPT-2, Llama 3, Qwen, …: each token is a string of bytes
    sentencepiece  Llama 2, Mistral, Gemma, T5, …: a token is text with `▁` for spaces, or one byte (`<0x0A>`)

The rest (WordPiece, …) is decoded over a small window of tokens that slides along.

All of them agree with the tokenizer's own `decode` of the whole output, bytes that are no UTF-8 included: they become
U+FFFD. One exception: in a run of byte tokens that starts with whole characters and then breaks, the tokenizers
library replaces the characters as well; here they were sent already, and stay. Special tokens have no text.
"""

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer


class Detokenizer(Protocol):
    """Of one output. Knows nothing of the prompt, so it cannot leak it."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now that these tokens follow; bytes of an unfinished character are kept."""
        ...

    def flush(self) -> str:
        """The output has ended: what was kept, as U+FFFD. Nothing may be decoded after it."""
        ...


class Vocabulary:
    """What each token id is worth as text. Shared by all outputs of a checkpoint; filled as ids are seen."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        # A decoder has no other way to say what it is; without one, `decoder` is None.
        state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        self._byte_level: _ByteLevelPieces | None = None
        self._sentencepiece: _SentencePieces | None = None
        if _is_byte_level(state):
            self._byte_level = _ByteLevelPieces(tokenizer, special_ids)
        elif (space := _sentencepiece_space(state)) is not None:
            self._sentencepiece = _SentencePieces(tokenizer, special_ids, **space)

    def detokenizer(self, *, continues_text: bool = False) -> Detokenizer:
        """For a new output. Sentencepiece drops the space before the first word of a text; with `continues_text` the
        output follows a text, and keeps it: then prompt and output, one after the other, are what they decode to
        together.
        """
        if self._byte_level is not None:
            return _ByteLevelDetokenizer(self._byte_level)
        if self._sentencepiece is not None:
            return _SentencePieceDetokenizer(self._sentencepiece, continues_text=continues_text)
        return _WindowDetokenizer(self._tokenizer)


# --- byte-level --------------------------------------------------------------------------------------------------


def _is_byte_level(state: dict[str, Any]) -> bool:
    if state.get("type") == "Sequence":
        return [decoder["type"] for decoder in state["decoders"]] == ["ByteLevel"]
    return state.get("type") == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (Radford et al., GPT-2, 2019).

    Bytes that print in Latin-1 stand for themselves; the others, in order, are U+0100, U+0101, …
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    silent = [byte for byte in range(0x100) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(silent)}


class _ByteLevelPieces(dict[int, bytes]):
    """Token id → its bytes."""

    _ALPHABET = _byte_alphabet()

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special_ids = special_ids

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        if token is None:  # special, or a row of the logits that the tokenizer has no use for
            piece = b""
        elif all(character in self._ALPHABET for character in token):
            piece = bytes(self._ALPHABET[character] for character in token)
        else:
            piece = token.encode()  # an added token that was never spelt in the alphabet
        self[token_id] = piece
        return piece


class _ByteLevelDetokenizer:
    def __init__(self, pieces: _ByteLevelPieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        return self._utf8.decode(b"".join([pieces[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


# --- sentencepiece -----------------------------------------------------------------------------------------------


def _sentencepiece_space(state: dict[str, Any]) -> dict[str, Any] | None:
    """How a sentencepiece decoder treats spaces (the arguments of `_SentencePieces`); None for any other decoder."""
    if state.get("type") == "Metaspace":
        drops = state["prepend_scheme"] != "never"
        return {"space": state["replacement"], "byte_fallback": False, "drops": "all" if drops else "none"}
    decoders = list(state.get("decoders", []))
    space = None
    byte_fallback = False
    if decoders and decoders[0]["type"] == "Replace" and decoders[0]["content"] == " ":
        space = decoders.pop(0)["pattern"].get("String")
    if decoders and decoders[0]["type"] == "ByteFallback":
        byte_fallback = bool(decoders.pop(0))
    if not space or not decoders or decoders.pop(0)["type"] != "Fuse":
        return None
    if not decoders:
        return {"space": space, "byte_fallback": byte_fallback, "drops": "none"}
    if decoders == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
        return {"space": space, "byte_fallback": byte_fallback, "drops": "one"}
    return None


class _SentencePieces(dict[int, str | bytes]):
    """Token id → its text, or, for a byte token, its byte.

    drops  what a text loses at its start: "one" space, "all" spaces of its first token (Metaspace), or "none"
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_ids: frozenset[int],
        *,
        space: str,
        byte_fallback: bool,
        drops: str,
    ) -> None:
        super().__init__()
        self.drops = drops
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._space = space
        self._byte_fallback = byte_fallback

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self._read(token_id, " ")
        self[token_id] = piece
        return piece

    def first(self, token_id: int) -> str | bytes:
        """The piece of a token that is the first of a text, where "all" spaces are dropped."""
        return self._read(token_id, "")

    def _read(self, token_id: int, space: str) -> str | bytes:
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""  # no byte: unlike a text, it does not end a run of byte tokens
        token = token.replace(self._space, space)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                return token
        return token


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD for each byte token, as sentencepiece has it (UTF-8 decoders make one of several bytes)."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("quire-replace-each-byte", _replace_each_byte)


class _SentencePieceDetokenizer:
    def __init__(self, pieces: _SentencePieces, *, continues_text: bool) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="quire-replace-each-byte")
        self._in_bytes = False
        self._drops = "none" if continues_text else pieces.drops

    def decode(self, token_ids: Sequence[int]) -> str:
        texts = []
        pieces = self._pieces
        for token_id in token_ids:
            piece = pieces[token_id]
            if self._drops == "all" and piece != b"":
                piece = pieces.first(token_id)
                self._drops = "none"
            if isinstance(piece, bytes):
                texts.append(self._utf8.decode(piece))
                self._in_bytes = True
                continue
            if self._in_bytes:
                texts.append(self._end_run())
            texts.append(piece)
        return self._without_leading_space("".join(texts))

    def flush(self) -> str:
        return self._without_leading_space(self._end_run())

    def _end_run(self) -> str:
        self._in_bytes = False
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

    def _without_leading_space(self, text: str) -> str:
        if self._drops != "one" or not text:
            return text
        self._drops = "none"
        return text.removeprefix(" ")


# --- any other ---------------------------------------------------------------------------------------------------


class _WindowDetokenizer:
    """Decodes a window of the output twice: without and with what is new; the difference is the new text.

    output   … ├── anchor ──┼── unsent ──┤
               anchor: tokens sent last; they give what follows its context (spaces, joins)
    """

    _MAX_UNSENT = 16  # a character is at most 4 bytes; tokens that never become one are not waited for

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor: list[int] = []
        self._unsent: list[int] = []

    def decode(self, token_ids: Sequence[int]) -> str:
        texts = []
        for token_id in token_ids:
            self._unsent.append(token_id)
            text = self._tokenizer.decode(self._anchor + self._unsent)
            if not text.endswith("\ufffd") or len(self._unsent) == self._MAX_UNSENT:
                texts.append(self._send(text))
        return "".join(texts)

    def flush(self) -> str:
        return self._send(self._tokenizer.decode(self._anchor + self._unsent))

    def _send(self, text: str) -> str:
        new = text[len(self._tokenizer.decode(self._anchor)) :]
        if new:  # else the tokens had no text: what comes next still follows the old anchor
            self._anchor = self._unsent
        self._unsent = []
        return new
