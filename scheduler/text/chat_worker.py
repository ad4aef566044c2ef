"""The process that renders chat templates. `scheduler.text.chat` runs it as a script; it imports nothing from Quire.

A checkpoint's chat template is an untrusted program. Jinja's sandbox keeps it away from Python's objects, but does not
limit time and memory: `{{ 7 ** (9 ** 9) }}` never returns to the interpreter. Templates therefore run in a separate
process, whose resources the kernel limits: SIGPROF ends it after `max_render_s` of processor time, and its address
space is bounded.

Standard input carries messages: a length of 4 bytes, big-endian, then JSON. Standard output carries a letter for each
chat, then a length of 4 bytes and UTF-8. It is not JSON, because the parent would parse that on its event loop.

    in    {"template", "variables", "tokens", "max_text_bytes", "max_render_s", "max_memory_bytes"}   once
    in    {"messages": [{"role", "content"}, …]}                                                      for each chat
    out   t and the text, or e and an error                                                           for each chat

`tokens` are the control tokens, with the fields of `scheduler.text.control_tokens.ControlToken`; without any, the text
is the template's. `ClientText` explains how clients' text is kept apart from them.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

USUAL_ROLES = frozenset({"assistant", "developer", "function", "system", "tool", "user"})
HIDING = "\x7f-\x84\x86-\x9f\ufdd0-\ufdef\U000f0000-\U000ffffd"
"""Characters that replace others during a render: neither white space nor letters, and JSON does not escape them."""


class GenerationBlock(Extension):
    """Renders `{% generation %}…{% endgeneration %}`, which marks text for training, as its content."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's `tojson`, which escapes for HTML and sorts keys. Templates expect this one."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def now(time_format: str) -> str:
    return datetime.now().strftime(time_format)


def compile_template(template: str, variables: dict[str, str]) -> Callable[[list[dict[str, str]], int], str]:
    """Returns a function of (messages, max_text_bytes). Both may raise any exception.

    Templates receive the same variables as from transformers' `apply_chat_template`.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": now}
    compiled = environment.from_string(template)

    def render(messages: list[dict[str, str]], max_text_bytes: int) -> str:
        chunks = []
        num_bytes = 0
        for chunk in compiled.generate(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **variables
        ):
            num_bytes += len(chunk.encode())
            if num_bytes > max_text_bytes:
                raise TemplateError(f"the rendered chat has more than {max_text_bytes} bytes")
            chunks.append(chunk)
        return "".join(chunks)

    return render


class ClientText:
    """Lets a template render clients' text in which it is impossible to recognise a control token.

    In contents and roles, the characters with which control tokens begin and end (`<` and `>` in most checkpoints) are
    replaced by characters that occur nowhere else in the chat. A token whose text is made of two contents, or of a
    content and the template, is not recognised either, nor one that appears when the template cuts or joins contents.
    Lengths and white space stay, so that filters and conditions work as before. After rendering, tokens that are left
    are the template's and become stand-ins; then the characters are restored.

    Tags that the template itself mentions, such as `</think>`, stay in contents, because templates look for them,
    unless they are control tokens in this message (an assistant's message keeps those that are markup). A token of
    letters only has no characters of its own, so only its whole text is hidden.

    A template can write a role into the middle of a control token: `<|{{ role }}|>`. A role that is part of a control
    token is therefore refused, unless it is a usual role or the template mentions it in quotes.
    """

    def __init__(self, tokens: list[dict[str, Any]], template: str) -> None:
        self._template = template
        self._stand_ins = {token["text"]: token["stand_in"] for token in tokens}
        self._is_token = re.compile(
            "|".join(
                rf"(?<!\w){re.escape(token['text'])}(?!\w)" if token["single_word"] else re.escape(token["text"])
                for token in sorted(tokens, key=lambda token: -len(token["text"]))
            )
        )
        texts = [text.strip() for text in self._stand_ins]
        self._keys = {key for text in texts for key in (text[0], text[-1]) if not key.isalnum()}
        words = [text for text in texts if self._keys.isdisjoint({text[0], text[-1]})]
        self._is_word = _any_of(words)
        self._hidden = sorted(self._keys | {text[0] for text in words})
        markup = {token["text"] for token in tokens if token["is_markup"]}
        tags = set(re.findall(r"</?\w+>", template))
        self._is_kept = _any_of(_unrelated(tags, self._stand_ins.keys()))
        self._is_kept_of_assistant = _any_of(_unrelated(tags | markup, self._stand_ins.keys() - markup))

    def hide(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, str]]:
        """Returns messages for the template, and the replaced character of each new one. May raise TemplateError."""
        if not self._stand_ins:
            return messages, {}
        used = {character for message in messages for text in message.values() for character in _hiding_in(text)}
        used.update(_hiding_in(self._template))
        free = (character for character in _hiding_characters() if character not in used)
        replacements = dict(zip(self._hidden, free, strict=False))
        if len(replacements) < len(self._hidden):
            raise TemplateError("the chat uses all characters for private use")
        hidden_messages = []
        for message in messages:
            role = message["role"]
            self._check_role(role)
            is_kept = self._is_kept_of_assistant if role == "assistant" else self._is_kept
            content = self._hide(message["content"], replacements, is_kept)
            hidden_messages.append({"role": self._hide(role, replacements, None), "content": content})
        return hidden_messages, {new: old for old, new in replacements.items()}

    def restore(self, text: str, replaced: dict[str, str]) -> str:
        """Returns the rendered text with the clients' characters, and stand-ins for the template's control tokens."""
        if not self._stand_ins:
            return text
        text = self._is_token.sub(lambda match: self._stand_ins[match[0]], text)
        for new, old in replaced.items():
            text = text.replace(new, old)
        return text

    def _hide(self, text: str, replacements: dict[str, str], is_kept: re.Pattern[str] | None) -> str:
        if self._is_word is not None:
            text = self._is_word.sub(lambda match: replacements[match[0][0]] + match[0][1:], text)
        # With a group, `split` also returns what it has found, at the odd positions.
        parts = [text] if is_kept is None else is_kept.split(text)
        for key in self._keys:
            parts[::2] = [part.replace(key, replacements[key]) for part in parts[::2]]
        return "".join(parts)

    def _check_role(self, role: str) -> None:
        if role in USUAL_ROLES or f"'{role}'" in self._template or f'"{role}"' in self._template:
            return
        if any(role in text[1:-1] for text in self._stand_ins):
            raise TemplateError(f"the role {role!r} is part of a control token, and the template does not mention it")


def _unrelated(tags: Iterable[str], texts: Collection[str]) -> list[str]:
    """Returns the tags that neither contain one of the texts nor are part of one."""
    return [tag for tag in tags if not any(text in tag or tag in text for text in texts)]


def _any_of(texts: Collection[str]) -> re.Pattern[str] | None:
    alternatives = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
    return re.compile(f"({alternatives})") if texts else None


def _hiding_in(text: str) -> set[str]:
    return set() if text.isascii() and "\x7f" not in text else set(re.findall(f"[{HIDING}]", text))


def _hiding_characters() -> Iterator[str]:
    for first, last in re.findall("(.)-(.)", HIDING):
        yield from map(chr, range(ord(first), ord(last) + 1))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent; this process ends when its input is closed
    settings = read_message()
    if settings is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (settings["max_memory_bytes"],) * 2)
    render = None
    client_text = ClientText(settings["tokens"], settings["template"])
    while (message := read_message()) is not None:
        signal.setitimer(signal.ITIMER_PROF, settings["max_render_s"])
        try:
            if render is None:
                render = compile_template(settings["template"], settings["variables"])
            messages, replaced = client_text.hide(message["messages"])
            # The characters that replace others may have more bytes.
            num_added_bytes = _num_bytes(messages) - _num_bytes(message["messages"]) if replaced else 0
            text = render(messages, settings["max_text_bytes"] + num_added_bytes)
            answer = b"t", client_text.restore(text, replaced)
        except Exception as error:  # noqa: BLE001  (a template can raise any exception; the parent reports it)
            answer = b"e", f"{type(error).__name__}: {error}"[:500]
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_answer(*answer)


def _num_bytes(messages: list[dict[str, str]]) -> int:
    return sum(len(text.encode()) for message in messages for text in message.values())


def read_message() -> dict[str, Any] | None:
    """Returns the next message, or None if the parent has closed the pipe."""
    header = sys.stdin.buffer.read(4)
    if len(header) < 4:
        return None
    body = sys.stdin.buffer.read(int.from_bytes(header))
    message: dict[str, Any] = json.loads(body)
    return message


def write_answer(kind: bytes, text: str) -> None:
    body = text.encode(errors="replace")
    sys.stdout.buffer.write(kind + len(body).to_bytes(4) + body)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
