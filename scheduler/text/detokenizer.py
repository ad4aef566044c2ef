"""Converts token ids to text a few at a time, in whole characters, without decoding earlier tokens again.

Decoding a growing output again for each token takes quadratic time, and cutting it by string length breaks characters
that span tokens. Almost every checkpoint, however, decodes in one of two ways in which the bytes of a token do not
depend on its neighbours. For these the bytes are looked up once per vocabulary and fed to an incremental UTF-8 decoder:

    byte-level     GPT-2, Llama 3, Qwen, …: each token is a string of bytes
    sentencepiece  Llama 2, Mistral, Gemma, T5, …: a token is text with `▁` for spaces, or one byte (`<0x0A>`)

Other tokenizers (WordPiece, …) are decoded over a small sliding window of tokens.

The result equals the tokenizer's own `decode` of the whole output, with one exception. If a run of byte tokens starts
with whole characters and then becomes invalid, the tokenizers library replaces these characters too; here they have
been sent already and stay. Bytes that are not UTF-8 become U+FFFD. Special tokens have no text,
unless a vocabulary shows them.
"""

import codecs
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from tokenizers import Tokenizer


class Detokenizer(Protocol):
    """Decodes one output. It has no access to the prompt, so it cannot leak it."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text that later tokens cannot change; keeps the bytes of an unfinished character."""
        ...

    def flush(self) -> str:
        """Ends the output and returns the kept bytes as U+FFFD. Nothing may be decoded afterwards."""
        ...


class Vocabulary:
    """The text of each token id, shared by all outputs of a checkpoint and filled when an id is first seen."""

    def __init__(self, tokenizer: Tokenizer, *, shows_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._hides_special_tokens = not shows_special_tokens
        special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and not shows_special_tokens
        )
        # The serialised state is the only way to learn the kind of a decoder.
        state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        self._byte_level: _ByteLevelPieces | None = None
        self._sentencepiece: _SentencePieces | None = None
        if _is_byte_level(state):
            self._byte_level = _ByteLevelPieces(tokenizer, special_ids)
        elif (space := _sentencepiece_space(state)) is not None:
            self._sentencepiece = _SentencePieces(tokenizer, special_ids, **space)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes for which a token stands within a text; the name of a special token; empty without one."""
        if self._byte_level is not None:
            piece: str | bytes = self._byte_level[token_id]
        elif self._sentencepiece is not None:
            piece = self._sentencepiece[token_id]
        else:
            piece = self._tokenizer.decode([token_id])
        if not piece:
            piece = self._tokenizer.id_to_token(token_id) or b""
        return piece if isinstance(piece, bytes) else piece.encode()

    def detokenizer(self, *, continues_text: bool = False) -> Detokenizer:
        """Returns a detokenizer for a new output.

        Sentencepiece drops the space before the first word of a text. With `continues_text` the output follows a
        prompt and keeps that space: prompt and output concatenated are then what they decode to together.
        """
        if self._byte_level is not None:
            return _ByteLevelDetokenizer(self._byte_level)
        if self._sentencepiece is not None:
            return _SentencePieceDetokenizer(self._sentencepiece, continues_text=continues_text)
        return _WindowDetokenizer(self._tokenizer, hides_special_tokens=self._hides_special_tokens)


# --- byte-level --------------------------------------------------------------------------------------------------


def _is_byte_level(state: dict[str, Any]) -> bool:
    if state.get("type") == "Sequence":
        return [decoder["type"] for decoder in state["decoders"]] == ["ByteLevel"]
    return state.get("type") == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character of a byte-level vocabulary (Radford et al., GPT-2, 2019).

    Bytes that print in Latin-1 are represented by themselves, the others in order by U+0100, U+0101, …
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    silent = [byte for byte in range(0x100) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(silent)}


class _ByteLevelPieces(dict[int, bytes]):
    """The bytes of each token id."""

    _ALPHABET = _byte_alphabet()

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special_ids = special_ids

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        if token is None:  # a special token, or a row of the logits without a token
            piece = b""
        elif all(character in self._ALPHABET for character in token):
            piece = bytes(self._ALPHABET[character] for character in token)
        else:
            piece = token.encode()  # an added token, which is not written in this alphabet
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
    """Returns arguments of `_SentencePieces`: how a decoder treats spaces. None if it is not sentencepiece."""
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
    """The text of each token id, or the byte of a byte token.

    drops  which spaces at the start of a text are dropped: "one", "all" of its first token (Metaspace), or "none"
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
        """Returns the piece of the first token of a text, without spaces."""
        return self._read(token_id, "")

    def _read(self, token_id: int, space: str) -> str | bytes:
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""  # empty bytes: unlike a text, they do not end a run of byte tokens
        token = token.replace(self._space, space)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                return token
        return token


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Replaces each byte with U+FFFD, like sentencepiece. UTF-8 decoders may use one for several bytes."""
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


# --- other tokenizers ---------------------------------------------------------------------------------------------


class _WindowDetokenizer:
    """Decodes a window of the output without and with its new tokens; the difference is the new text.

    output   … ├── anchor ──┼── unsent ──┤
               anchor: the tokens sent last, which are the context of the unsent ones (spaces, joins)
    """

    _MAX_UNSENT = 16  # a character has at most 4 bytes; more unsent tokens never complete one

    def __init__(self, tokenizer: Tokenizer, *, hides_special_tokens: bool = True) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=hides_special_tokens)
        self._anchor: list[int] = []
        self._unsent: list[int] = []

    def decode(self, token_ids: Sequence[int]) -> str:
        texts = []
        for token_id in token_ids:
            self._unsent.append(token_id)
            text = self._decode(self._anchor + self._unsent)
            if not text.endswith("\ufffd") or len(self._unsent) == self._MAX_UNSENT:
                texts.append(self._send(text))
        return "".join(texts)

    def flush(self) -> str:
        return self._send(self._decode(self._anchor + self._unsent))

    def _send(self, text: str) -> str:
        new = text[len(self._decode(self._anchor)) :]
        if new:  # tokens without text do not become the anchor
            self._anchor = self._unsent
        self._unsent = []
        return new
