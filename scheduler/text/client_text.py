"""Keeps clients' text apart from control tokens while a template renders it. `chat_worker` runs this in its process.

It imports nothing but the standard library and jinja2's error, because that process must be small and start quickly.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

USUAL_ROLES = frozenset({"assistant", "developer", "function", "system", "tool", "user"})
HIDING = "\x7f-\x84\x86-\x9f\ufdd0-\ufdef\U000f0000-\U000ffffd"
"""Characters that replace others during a render: neither white space nor letters, and JSON does not escape them."""


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """A chat as a template receives it, with the values that transformers' `apply_chat_template` would pass.

    mark  the text at the end of the last message, if the completion continues that message
    """

    messages: list[dict[str, Any]]
    tools: list[Any]
    arguments: dict[str, Any]
    mark: str | None = None

    def texts(self) -> Iterator[str]:
        """Yields all texts, those in JSON values and the names in these included."""
        yield from _texts([self.messages, self.tools, self.arguments])


class ClientText:
    """Lets a template render clients' text in which it is impossible to recognise a control token.

    In all texts of the chat, the characters with which control tokens begin and end (`<` and `>` in most checkpoints)
    are replaced by characters that occur nowhere else in it. A token whose text is made of two contents, or of a
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

    def hide(self, chat: TemplateInput) -> tuple[TemplateInput, dict[str, str]]:
        """Returns a chat for the template, and the replaced character of each new one. May raise TemplateError."""
        used = {character for text in chat.texts() for character in _hiding_in(text)}
        used.update(_hiding_in(self._template))
        free = (character for character in _hiding_characters() if character not in used)
        replacements = dict(zip(self._hidden, free, strict=False)) if self._stand_ins else {}
        mark = None if chat.mark is None else f"{next(free, '')} "
        if mark == " " or (self._stand_ins and len(replacements) < len(self._hidden)):
            raise TemplateError("the chat uses all characters for private use")
        messages = [self._hidden_message(message, replacements) for message in chat.messages]
        if mark is not None:
            messages[-1]["content"] += mark
        tools = [self._hide(tool, replacements, None) for tool in chat.tools]
        arguments = {name: self._hide(value, replacements, None) for name, value in chat.arguments.items()}
        return TemplateInput(messages, tools, arguments, mark), {new: old for old, new in replacements.items()}

    def _hidden_message(self, message: dict[str, Any], replacements: dict[str, str]) -> dict[str, Any]:
        if not self._stand_ins:
            return dict(message)
        role = message["role"]
        self._check_role(role)
        is_kept = self._is_kept_of_assistant if role == "assistant" else self._is_kept
        return {
            name: self._hide(value, replacements, is_kept if name == "content" else None)
            for name, value in message.items()
        }

    def restore(self, text: str, replaced: dict[str, str]) -> str:
        """Returns the rendered text with the clients' characters, and stand-ins for the template's control tokens."""
        if not self._stand_ins:
            return text
        text = self._is_token.sub(lambda match: self._stand_ins[match[0]], text)
        for new, old in replaced.items():
            text = text.replace(new, old)
        return text

    def _hide(self, value: Any, replacements: dict[str, str], is_kept: re.Pattern[str] | None) -> Any:
        """Returns a JSON value in which texts and keys are replaced by hidden ones."""
        if isinstance(value, str):
            return self._hide_text(value, replacements, is_kept) if replacements else value
        if isinstance(value, list):
            return [self._hide(each, replacements, is_kept) for each in value]
        if isinstance(value, dict):
            return {
                self._hide(name, replacements, is_kept): self._hide(each, replacements, is_kept)
                for name, each in value.items()
            }
        return value

    def _hide_text(self, text: str, replacements: dict[str, str], is_kept: re.Pattern[str] | None) -> str:
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
        plain = role.strip().casefold()  # a template may change it so
        if any(plain in text[1:-1].casefold() for text in self._stand_ins):
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


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
