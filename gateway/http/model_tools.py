"""Asks a scheduler how the served model writes calls of tools and thoughts.

The gateway asks for itself. As calls of a client, the questions before its first chat would count against the limit of
its tenant, and a small limit would never let the chat follow.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.api.errors import ApiError
from gateway.api.structured_output import answer_schema
from gateway.api.tool_calls import ModelTools, ToolReading
from gateway.api.tool_choice import UNWRITABLE_NAMES
from gateway.tools.formats import FORMATS, format_of
from gateway.tools.thoughts import tags_of
from quire.errors import InternalError, InvalidRequestError, QuireError, UnavailableError
from quire.v1 import generation_pb2
from quire.v1 import tokenization_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.api.endpoint import ParsedRequest
    from gateway.schedulers.schedulers import Schedulers


MAX_PROMPTS = 64
"""Combinations of template arguments whose prompts are remembered."""

MAX_REMEMBERED_CHARACTERS = 1024

TWO_GRAMMARS = "must not be forced, strict or limited beside a regex, choice or grammar"


class ServedModelTools:
    """Remembers the answers. The name of a format replaces the choice by the chat template."""

    def __init__(self, schedulers: Schedulers, format_name: str | None) -> None:
        self._schedulers = schedulers
        self._format_name = format_name
        self._found: tuple[str, ModelTools] | None = None
        self._opened: dict[tuple[tuple[str, str], ...], bool] = {}  # by template arguments

    async def of(self, parsed: ParsedRequest) -> ModelTools | None:
        """Returns the format for a chat; None for other requests. Raises QuireError if a chat with tools needs it."""
        if not all(request.HasField("chat") for request in parsed.requests):
            return None
        info = self._schedulers.info
        model = "" if info is None else info.model_name
        if self._found is None or self._found[0] != model:
            try:
                self._found = (model, await self._ask())
                self._opened.clear()
            except QuireError as error:
                if parsed.tools is not None or isinstance(error, UnavailableError):
                    raise
                return None
        return self._found[1]

    async def begins_in_thought(self, parsed: ParsedRequest, tools: ModelTools, authorization: str) -> bool:
        """Returns whether the prompt ends within a thought, as some templates let it.

        The template is asked with a chat of its own, so that what users write does not count.
        """
        if tools.thoughts is None:
            return False
        chat = parsed.requests[0].chat
        if chat.continue_final_message:
            return bool(chat.messages) and tools.thoughts.is_open(chat.messages[-1].content)
        key = tuple(sorted(chat.template_arguments.items()))
        if key not in self._opened:
            probe = generation_pb2.ChatPrompt(template_arguments=chat.template_arguments)
            probe.messages.add(role="user", content="?")
            request = pb.TokenizeRequest(chat=probe, return_bytes=True)
            try:  # a client that sends many different arguments does so on its own account
                asker = authorization if key else None
                response = await self._schedulers.tokenization("Tokenize", request, asker)
            except UnavailableError:
                raise
            except QuireError:
                return False  # the request fails too
            is_open = tools.thoughts.is_open(b"".join(response.tokens).decode(errors="replace"))
            if len(str(key)) > MAX_REMEMBERED_CHARACTERS:
                return is_open
            if len(self._opened) >= MAX_PROMPTS:
                self._opened.clear()
            self._opened[key] = is_open
        return self._opened[key]

    async def _ask(self) -> ModelTools:
        """Raises QuireError."""
        wanted = pb.GetTokenizerInfoRequest()
        info = await self._schedulers.tokenization("GetTokenizerInfo", wanted, None)
        template = info.chat_template
        tool_format = format_of(template) if self._format_name is None else FORMATS[self._format_name]
        tokens = {}
        for text in (*tool_format.markers, *tool_format.passed):
            request = pb.TokenizeRequest(text=text, add_special_tokens=False, return_bytes=True)
            response = await self._schedulers.tokenization("Tokenize", request, None)
            if list(response.tokens) == [text.encode()]:
                tokens[text] = response.token_ids[0]
        thoughts = None if tool_format.name == "harmony" else tags_of(template)
        return ModelTools(tool_format, tokens, thoughts, await self._names(info.eos_token_ids))

    async def _names(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Returns the names of those tokens that have one. Raises QuireError."""
        names = {}
        for token_id in token_ids:
            request = pb.DetokenizeRequest(token_ids=[token_id])
            with suppress(InvalidRequestError, InternalError):  # a checkpoint can name an id that its tokenizer lacks
                names[token_id] = (await self._schedulers.tokenization("Detokenize", request, None)).text
        return names


def prepare(
    parsed: ParsedRequest, tools: ModelTools, request_id: str, *, begins_in_thought: bool = False
) -> ToolReading | None:
    """Lets the requests of a chat write calls in the format of the model. Returns None if their text has no structure.

    Raises ApiError if no grammar can have both the calls and the answer.
    """
    use = parsed.tools
    # Under a grammar that begins with the answer itself, the model cannot think.
    is_bound = any(request.HasField("structured_output") for request in parsed.requests)
    thoughts = None if is_bound or (use is not None and use.is_forced) else tools.thoughts
    if thoughts is None and tools.format.reader(use) is None:
        return None
    for request in parsed.requests:
        request.output.special_tokens = bool(tools.format.markers) or thoughts is not None
        if use is None or not use.is_read:
            continue
        schema = answer_schema(request.structured_output)
        if schema is None and request.structured_output.HasField("json_schema"):
            continue  # the scheduler will refuse it
        is_other = request.HasField("structured_output") and schema is None
        restricted = replace(use, schema=schema)
        if restricted.needs_grammar:
            if is_other or not restricted.has_writable_names:
                raise ApiError(f"tools: {TWO_GRAMMARS if is_other else UNWRITABLE_NAMES}", param="tools")
            request.structured_output.lark = tools.format.grammar(restricted, tools.tokens)
    return ToolReading(tools, use, request_id, thoughts, is_within=begins_in_thought)
