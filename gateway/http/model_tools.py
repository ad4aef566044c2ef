"""Asks a scheduler how the served model writes calls of tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.api.errors import ApiError
from gateway.api.tool_calls import ModelTools, ToolReading
from gateway.tools.formats import FORMATS, format_of
from quire.errors import QuireError
from quire.v1 import tokenization_pb2 as pb

if TYPE_CHECKING:
    from gateway.api.endpoint import ParsedRequest
    from gateway.schedulers.schedulers import Schedulers


class ServedModelTools:
    """Remembers the answer. The name of a format replaces the choice by the chat template."""

    def __init__(self, schedulers: Schedulers, format_name: str | None) -> None:
        self._schedulers = schedulers
        self._format_name = format_name
        self._found: tuple[str, ModelTools] | None = None

    async def of(self, parsed: ParsedRequest, authorization: str) -> ModelTools | None:
        """Returns the format for a chat; None for other requests. Raises QuireError if a chat with tools needs it."""
        if not all(request.HasField("chat") for request in parsed.requests):
            return None
        info = self._schedulers.info
        model = "" if info is None else info.model_name
        if self._found is None or self._found[0] != model:
            try:
                self._found = (model, await self._ask(authorization))
            except QuireError:
                if parsed.tools is None:
                    return None
                raise
        return self._found[1]

    async def _ask(self, authorization: str) -> ModelTools:
        """Raises QuireError."""
        if self._format_name is None:
            wanted = pb.GetTokenizerInfoRequest()
            info = await self._schedulers.tokenization("GetTokenizerInfo", wanted, authorization)
            tool_format = format_of(info.chat_template)
        else:
            tool_format = FORMATS[self._format_name]
        tokens = {}
        for text in (*tool_format.markers, *tool_format.passed):
            request = pb.TokenizeRequest(text=text, add_special_tokens=False, return_bytes=True)
            response = await self._schedulers.tokenization("Tokenize", request, authorization)
            if list(response.tokens) == [text.encode()]:
                tokens[text] = response.token_ids[0]
        return ModelTools(tool_format, tokens)


def prepare(parsed: ParsedRequest, tools: ModelTools, request_id: str) -> ToolReading | None:
    """Lets the requests of a chat write calls in the format of the model. Returns None if their text has no structure.

    Raises ApiError if forced calls contradict another field.
    """
    use = parsed.tools
    if tools.format.reader(use) is None:
        return None
    for request in parsed.requests:
        request.output.special_tokens = bool(tools.format.markers)
        if use is None or not use.needs_grammar:
            continue
        if request.HasField("structured_output"):
            message = "cannot be combined with a response format: calls are forced, strict or limited to one"
            raise ApiError(f"tools: {message}", param="tools")
        request.structured_output.lark = tools.format.grammar(use, tools.tokens)
    return ToolReading(tools, use, request_id)
