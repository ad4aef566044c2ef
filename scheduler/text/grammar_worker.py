"""The process that compiles grammars. `scheduler.text.grammars` starts it; of this project it imports what reads
grammars and schemas, and its neighbour `worker_pipe`.

A client's schema is an untrusted program for the compiler of llguidance. SIGPROF ends this process after `max_s` of
processor time for one grammar, and it may take `max_memory_bytes` of address space in addition to the vocabulary. Its
stack is smaller than that of the executor's threads, which therefore can use every grammar that it has compiled. A
schema refers to nothing outside itself: llguidance opens no file and no connection.

The messages, which `worker_pipe` reads and writes:

    in    {"tokenizer", "eos_token_ids", "max_s", "max_memory_bytes"}    once; the first is the path of tokenizer.json
    in    {"kind", "text", "vocab_size"}                                 for each grammar
    out   g and the grammar in llguidance's form; e and an error; or m   for each grammar; m means a lack of memory
"""

import json
import os
import resource
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from quire.grammar_options import JSON_OPTIONS
from quire.grammars import COMPILER_STACK_BYTES, MAX_GRAMMAR_BYTES, grammar_tokenizer, matcher
from quire.json_schemas import has_unwritable_text, restated

from .worker_pipe import read_message, write_answer

MAX_ERROR_CHARACTERS = 400

NOTHING_FITS = "NoExtension"
"""Begins llguidance's error if no token may come next."""


class BadGrammar(Exception):
    """The definition is not a grammar that can be followed. The text says why."""


def grammar_of(kind: str, text: str) -> str:
    """Returns a grammar in llguidance's JSON form. Raises BadGrammar, also for what is no JSON.

    kind  "json_schema", "regex", "lark", or "choice" with a JSON list of texts
    """
    if kind == "json_schema":
        _check_texts(text)
        try:
            return LLMatcher.grammar_from_json_schema(_restated(text), overrides=JSON_OPTIONS)  # type: ignore[arg-type]
        except ValueError as error:
            raise BadGrammar(f"must be a JSON schema that is an object: {error}") from None
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        text = "start: " + " | ".join(map(_lark_string, json.loads(text)))
    return json.dumps({"grammars": [{"lark_grammar": text}]}, ensure_ascii=False)


def unforced(grammar: str) -> str:
    """Returns a grammar with the same texts, for which llguidance never chooses the tokens of a text.

    It would choose the special token where only the name of one can come next, and then allow no token.
    """
    own = json.loads(grammar)["grammars"][0]
    lark = own.get("lark_grammar") or f"start: %json {json.dumps(own['json_schema'])}"
    if "%llguidance" in lark:
        return grammar
    lark += '\n%llguidance {"no_forcing": true}\n'
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False)


def names_special_token(kind: str, text: str, names: Collection[str]) -> bool:
    """Returns whether the texts of a grammar can have one of these names. The arguments are those of `grammar_of`."""
    if kind in ("json_schema", "choice"):
        text = json.dumps(json.loads(text), ensure_ascii=False)
    plain = text.replace("\\", "")
    return any(name in plain for name in names)


def special_names(tokenizer_json: str) -> frozenset[str]:
    """Returns the names of the special tokens of a tokenizer."""
    added = json.loads(tokenizer_json).get("added_tokens") or ()
    return frozenset(token["content"] for token in added if token.get("special"))


def _lark_string(text: str) -> str:
    """Returns a text as a string of Lark: as in JSON, but DEL has to be escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_texts(text: str) -> None:
    """Raises BadGrammar for a schema whose texts llguidance would shorten. It refuses what cannot be read by itself."""
    if "\\" not in text and "\x7f" not in text:
        return
    try:
        is_unwritable = has_unwritable_text(json.loads(text))
    except (ValueError, RecursionError):
        return
    if is_unwritable:
        raise BadGrammar("const, enum and pattern can have no control character but \\b, \\f, \\n, \\r and \\t")


def _restated(text: str) -> str:
    """Returns the text of a schema in keywords that llguidance follows. What cannot be read stays as it is, to be
    refused by llguidance, which names the position."""
    try:
        schema = json.loads(text)
        found = restated(schema) if isinstance(schema, dict) else schema
        return text if found == schema else json.dumps(found)
    except (ValueError, RecursionError):
        return text


def checked_grammar(tokenizer: LLTokenizer, kind: str, text: str, names: Collection[str] = ()) -> str:
    """Returns the grammar, of which the executor makes the same matcher. Raises BadGrammar.

    names  of the special tokens of the tokenizer
    """
    grammar = grammar_of(kind, text)
    if names_special_token(kind, text, names):
        grammar = unforced(grammar)
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise BadGrammar(f"has {num_bytes} bytes in llguidance's form, more than {MAX_GRAMMAR_BYTES}")
    followed = matcher(tokenizer, grammar)
    if not followed.is_error():
        followed.compute_bitmask()  # some grammars fail at the first token only
    if followed.is_error():
        error = followed.get_error().removesuffix("<non-verbose/>").strip()
        raise BadGrammar("no text fits it" if error.startswith(NOTHING_FITS) else error)
    return grammar


class Vocabulary:
    """The tokenizer of the checkpoint, as matchers need it. It is read at the first grammar."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._path = Path(settings["tokenizer"])
        self._eos_token_ids = settings["eos_token_ids"]
        self._max_memory_bytes = settings["max_memory_bytes"]
        self._tokenizer: LLTokenizer | None = None
        self.special_names: frozenset[str] = frozenset()

    def tokenizer(self, vocab_size: int) -> LLTokenizer:
        """Returns the tokenizer. From then on the memory of this process is limited."""
        if self._tokenizer is None:
            text = self._path.read_text(encoding="utf-8")
            self._tokenizer = grammar_tokenizer(text, vocab_size, self._eos_token_ids)
            self.special_names = special_names(text)
            resource.setrlimit(resource.RLIMIT_AS, (_address_space() + self._max_memory_bytes,) * 2)
        return self._tokenizer


def _address_space() -> int:
    """Returns the size of this process in bytes, or a generous guess where the system does not say."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 4 * 2**30
    return num_pages * resource.getpagesize()


def main() -> None:
    # A Rust panic message can quote a client's grammar, and this is the scheduler's log.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    own = COMPILER_STACK_BYTES if most == resource.RLIM_INFINITY else min(most, COMPILER_STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (own, most))
    settings = read_message()
    if settings is None:
        return
    vocabulary = Vocabulary(settings)
    while (message := read_message()) is not None:
        try:
            tokenizer = vocabulary.tokenizer(message["vocab_size"])
        except Exception as error:  # noqa: BLE001  (llguidance raises different ones; the parent reports it)
            write_answer(b"e", f"cannot be followed with this model's tokenizer: {error}"[:MAX_ERROR_CHARACTERS])
            continue
        signal.setitimer(signal.ITIMER_PROF, settings["max_s"])
        try:
            answer = b"g", checked_grammar(tokenizer, message["kind"], message["text"], vocabulary.special_names)
        except BadGrammar as error:
            answer = b"e", str(error)[:MAX_ERROR_CHARACTERS]
        except MemoryError:
            answer = b"m", ""
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_answer(*answer)
