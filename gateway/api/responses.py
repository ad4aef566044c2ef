"""POST /v1/responses, without stored state: the body as a request to a scheduler."""

from collections.abc import Sequence
from typing import Any

from gateway.api.endpoint import Chunks, Collector, EchoedPrompt, Head, ParsedRequest
from gateway.api.fields import MAX_SHOWN, Fields, shown
from gateway.api.json_values import is_writable
from gateway.api.messages import (
    ASSISTANT_PARTS,
    MAX_MESSAGES,
    TEXT_PARTS,
    add_effort,
    add_plain_tool,
    call_arguments,
)
from gateway.api.responses_answer import ResponseChunks, ResponseCollector, Settings
from gateway.api.sampling import NAMES, plain_request
from gateway.api.structured_output import add_text_format
from gateway.api.tool_calls import GRAMMAR_NAMES, names_of_forced
from gateway.api.tool_choice import MAX_TOOLS, chat_tool_use
from gateway.tools.tool_use import ToolUse
from quire.v1 import generation_pb2 as pb

KNOWN = {
    "model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "stream", "stream_options", "tools",
    "tool_choice", "parallel_tool_calls", "metadata", "top_logprobs", "include", "text", "store", "reasoning",
    "cache_salt",
}  # fmt: skip
IGNORED = {
    "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    "client_metadata",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "context_management": (),
}
MAX_METADATA = 16
"""Most entries of `metadata`, as in OpenAI's API. The answer repeats them."""

_ABSENT_OF_TOOL = {"description": None, "parameters": None, "strict": None}
IGNORED_IN_PARTS = ("annotations", "logprobs")
LOGPROBS = "message.output_text.logprobs"
IGNORED_INCLUDES = {"reasoning.encrypted_content"}

_ROLES = ("system", "developer", "user", "assistant")
_STATUS: dict[str, tuple[Any, ...]] = {"status": ("completed", "incomplete", "in_progress")}
_PHASE: dict[str, tuple[Any, ...]] = {"phase": ("commentary", "final_answer")}
_NAMES = (
    NAMES
    | GRAMMAR_NAMES
    | {
        "prompt": "input",
        "chat": "input",
        "chat.messages": "input",
        "chat.tools": "tools",
        "stopping.max_tokens": "max_output_tokens",
        "output.logprobs": "top_logprobs",
    }
)


def parse_response(body: object) -> ParsedRequest:
    """Returns the request. Raises ApiError that names every bad field."""
    fields = Fields(body)
    fields.raise_problems()
    fields.check_names(KNOWN | IGNORED, NEUTRAL)
    model = fields.text("model", "") or ""
    request = plain_request(fields, "max_output_tokens")
    has_logprobs = _add_logprobs(fields, request)
    names = _NAMES | _add_text(fields, request)
    fields.flag("store")  # nothing is stored, whatever it says
    if instructions := fields.text("instructions"):
        request.chat.messages.add(role="system", content=instructions)
    _add_input(fields, request.chat)
    tools = _add_tools(fields, request.chat)
    names |= names_of_forced(tools)
    is_streamed = fields.flag("stream")
    if (options := fields.nested("stream_options")) is not None:
        options.check_names({"include_obfuscation"})
        options.flag("include_obfuscation")
    settings = Settings(
        has_logprobs=has_logprobs,
        repeated={
            "instructions": instructions,
            "max_output_tokens": fields.get("max_output_tokens"),
            "metadata": _metadata(fields),
            "safety_identifier": fields.text("safety_identifier"),
            "prompt_cache_key": fields.text("prompt_cache_key"),
            "parallel_tool_calls": fields.flag("parallel_tool_calls", default=True),
            "reasoning": _add_reasoning(fields, request.chat),
            "temperature": fields.number("temperature"),
            "text": {"format": _format_of(fields)},
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": [
                _ABSENT_OF_TOOL | tool for tool in fields.few_items("tools", MAX_TOOLS) if isinstance(tool, dict)
            ],
            "top_p": fields.number("top_p"),
            "top_logprobs": fields.get("top_logprobs") or 0,
        },
    )
    fields.raise_problems()
    for name, value in settings.repeated.items():
        if not is_writable(value):  # the answer repeats it
            fields.add_problem(name, "must be JSON with finite numbers and without lone surrogates")
    fields.raise_problems()

    def chunks(head: Head, _: Sequence[EchoedPrompt]) -> Chunks:
        return ResponseChunks(head, settings)

    def collector(head: Head, _: Sequence[EchoedPrompt]) -> Collector:
        return ResponseCollector(head, settings)

    return ParsedRequest(model, [request], names, "resp_", is_streamed, chunks, collector, tools=tools)


def _metadata(fields: Fields) -> dict[str, str]:
    entries = fields.few_entries("metadata", MAX_METADATA).items()
    return {
        name: fields.check_text(f"metadata.{name[:MAX_SHOWN]}", value) for name, value in entries if value is not None
    }


def _add_logprobs(fields: Fields, request: pb.GenerateRequest) -> bool:
    """Reads `include` and `top_logprobs`. Returns whether the answer has log-probabilities."""
    included = fields.items("include")
    for place, each in fields.numbered("include", included):
        if not isinstance(each, str) or (each != LOGPROBS and each not in IGNORED_INCLUDES):
            fields.add_problem(place, f"is not supported: {shown(each)}")
    num_top = fields.integer("top_logprobs")
    has_logprobs = LOGPROBS in included
    if has_logprobs:
        request.output.logprobs = num_top or 0
        request.output.token_bytes = True
    elif num_top:
        fields.add_problem("top_logprobs", f"is allowed only if include has {LOGPROBS}")
    return has_logprobs


def _add_reasoning(fields: Fields, chat: pb.ChatPrompt) -> dict[str, str | None]:
    """Reads `reasoning`. Returns what the answer repeats. Thoughts are shown whole, so there is no summary of them."""
    reasoning, effort = fields.nested("reasoning"), None
    if reasoning is not None:
        reasoning.check_names({"effort"}, {"summary": ("auto",), "generate_summary": ("auto",)})
        effort = add_effort(reasoning, "effort", chat)
    return {"effort": effort, "summary": None}


def _add_text(fields: Fields, request: pb.GenerateRequest) -> dict[str, str]:
    """Reads `text`. Returns the names of what it adds, for errors."""
    text = fields.nested("text")
    if text is None:
        return {}
    text.check_names({"format"}, {"verbosity": ("medium",)})
    return add_text_format(text, request)


def _format_of(fields: Fields) -> Any:
    """Returns the format of the answer as the client wrote it."""
    text = fields.nested("text")
    return (None if text is None else text.get("format")) or {"type": "text"}


def _add_input(fields: Fields, chat: pb.ChatPrompt) -> None:
    given = fields.get("input")
    if isinstance(given, str):
        chat.messages.add(role="user", content=fields.check_text("input", given))
        return
    items = fields.few_items("input", MAX_MESSAGES)
    if not items:
        fields.add_problem("input", "must be a string, or a list with at least one item")
    thoughts: list[str] = []
    for place, value in fields.numbered("input", items):
        item = Fields(value, f"{place}.", fields.problems)
        if isinstance(value, dict):
            if item.get("type") == "reasoning":
                thoughts += [item.joined_text("content", ("reasoning_text", "text"))] if "content" in item else []
            else:
                _add_item(item, chat)
                _add_thoughts(thoughts, chat)
                thoughts = []


def _add_thoughts(thoughts: list[str], chat: pb.ChatPrompt) -> None:
    """Adds thoughts to the message of the assistant that follows them. Those before another message are left out."""
    if any(thoughts) and chat.messages and chat.messages[-1].role == "assistant":
        message = chat.messages[-1]
        message.reasoning_content = "\n".join([message.reasoning_content] * bool(message.reasoning_content) + thoughts)


def _add_item(item: Fields, chat: pb.ChatPrompt) -> None:
    match item.get("type"):
        case None | "message":
            item.check_names({"type", "role", "content", "id"}, _STATUS | _PHASE)
            role = item.get("role")
            if role not in _ROLES:
                item.add_problem("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
                return
            parts = ASSISTANT_PARTS if role == "assistant" else TEXT_PARTS
            content = item.joined_text("content", parts, ignored=IGNORED_IN_PARTS)
            chat.messages.add(role="system" if role == "developer" else role, content=content)
        case "function_call":
            item.check_names({"type", "call_id", "name", "arguments", "id"}, _STATUS)
            call = pb.ToolCall(id=item.required("call_id"), name=item.required_name(), arguments=call_arguments(item))
            if not (chat.messages and chat.messages[-1].role == "assistant"):
                chat.messages.add(role="assistant")
            chat.messages[-1].tool_calls.append(call)
        case "function_call_output":
            item.check_names({"type", "call_id", "output", "id"}, _STATUS)
            output = item.joined_text("output", TEXT_PARTS, ignored=IGNORED_IN_PARTS)
            chat.messages.add(role="tool", content=output, tool_call_id=item.required("call_id"))
        case kind:
            item.add_problem("type", f"is not supported: {shown(kind)}")


def _add_tools(fields: Fields, chat: pb.ChatPrompt) -> ToolUse | None:
    """Adds the tools. Templates receive them in the form of chat completions.

    An offered search of the web is never used, and no error: Codex offers one with each request.
    """
    tools = []
    for i, value in enumerate(fields.few_items("tools", MAX_TOOLS)):
        tool = Fields(value, f"tools[{i}].", fields.problems)
        if tool.get("type") == "web_search":
            continue
        tool.check_names({"type", "name", "description", "parameters", "strict"})
        if tool.get("type") != "function":
            tool.add_problem("type", f'must be "function", not {shown(tool.get("type"))}')
        tools.append(add_plain_tool(tool, "parameters", chat))
    return chat_tool_use(fields, tools, needing_tools=("required",))  # answers without tools say "auto", too
