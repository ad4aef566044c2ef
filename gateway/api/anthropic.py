"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API: the bodies as requests to a scheduler."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from gateway.api.anthropic_answer import MessageChunks, MessageCollector
from gateway.api.endpoint import Chunks, Collector, EchoedPrompt, Head, ParsedRequest
from gateway.api.errors import ApiError
from gateway.api.fields import Fields, shown
from gateway.api.messages import CACHE_CONTROL, add_effort, add_plain_tool, each_message
from gateway.api.sampling import MAX_STOP, plain_request
from gateway.api.sampling import NAMES as SAMPLING_NAMES
from gateway.api.structured_output import add_output_format
from gateway.api.tool_calls import GRAMMAR_NAMES, names_of_forced
from gateway.api.tool_choice import MAX_TOOLS, anthropic_tool_use
from gateway.tools.tool_use import ToolUse
from quire.v1 import generation_pb2 as pb
from quire.v1 import tokenization_pb2

COUNTED = {
    "model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format",
    "context_management",
}  # fmt: skip
"""The fields of requests to count tokens."""

KNOWN = COUNTED | {"max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k", "cache_salt"}
IGNORED = {"metadata", "service_tier", "inference_geo", "diagnostics"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    **CACHE_CONTROL,
    "speed": ("standard",),
}

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""The line with which Claude Code begins its system prompt. Its last part differs in each request, so that no prompt
would begin like the one before, and nothing would be cached."""

MIN_THINKING_BUDGET = 1024
"""The least, as in Anthropic's API: a program that works here works there."""

CLEAR_THOUGHTS = "clear_thinking_20251015"

_NEUTRAL_IN_TEXT = CACHE_CONTROL | {"citations": ([],)}
_NEUTRAL_IN_CALL = CACHE_CONTROL | {"caller": ({"type": "direct"},)}
"""Blocks of answers have these fields, too, and clients send them back."""

_NEUTRAL_IN_TOOL = CACHE_CONTROL | {
    "eager_input_streaming": (True, False),  # arguments are streamed as they are written
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
}

NAMES = (
    SAMPLING_NAMES
    | GRAMMAR_NAMES
    | {
        "prompt": "messages",
        "chat": "messages",
        "chat.messages": "messages",
        "chat.tools": "tools",
        "chat.template_arguments": "thinking",
        "stopping.stop": "stop_sequences",
    }
)


def parse_message(body: object) -> ParsedRequest:
    """Returns the request. Raises ApiError that names every bad field."""
    fields = Fields(body)
    fields.raise_problems()
    _refuse_thread(fields)
    fields.check_names(KNOWN | IGNORED, NEUTRAL)
    model = fields.text("model", "") or ""
    request = plain_request(fields, "max_tokens")
    if (top_k := fields.integer("top_k")) is not None:
        request.sampling.top_k = top_k
    if "max_tokens" not in fields:
        fields.add_problem("max_tokens", "must be given")
    names = NAMES | add_output_format(fields, request)
    stop = fields.texts("stop_sequences", MAX_STOP)
    request.stopping.stop.extend(stop)
    request.stopping.include_stop = True  # the answer says which one it was; it is cut off again there
    tools = _add_prompt(fields, request.chat)
    names |= names_of_forced(tools)
    is_streamed = fields.flag("stream")
    fields.raise_problems()

    def chunks(head: Head, _: Sequence[EchoedPrompt]) -> Chunks:
        return MessageChunks(head, stop)

    def collector(head: Head, _: Sequence[EchoedPrompt]) -> Collector:
        return MessageCollector(head, stop)

    return ParsedRequest(model, [request], names, "msg_", is_streamed, chunks, collector, tools=tools)


def _refuse_thread(fields: Fields) -> None:
    """Refuses a request that lets the server hold the conversation, with the details by which a client tells why.

    The tool runner of Anthropic's client then sends the whole conversation with each request.
    """
    if "thread" in fields:
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise ApiError("thread: is not supported: this server holds no conversations", param="thread", details=details)


def parse_count(body: object) -> tuple[str, tokenization_pb2.TokenizeRequest]:
    """Returns the model and the chat whose tokens are to be counted. Raises ApiError that names every bad field."""
    fields = Fields(body)
    fields.raise_problems()
    fields.check_names(COUNTED | IGNORED, NEUTRAL)
    add_output_format(fields, pb.GenerateRequest())  # is checked, and changes no prompt
    request = tokenization_pb2.TokenizeRequest()
    _add_prompt(fields, request.chat)
    model = fields.text("model", "") or ""
    fields.raise_problems()
    return model, request


def token_count(response: tokenization_pb2.TokenizeResponse) -> dict[str, Any]:
    return {"input_tokens": len(response.token_ids)}


def _add_prompt(fields: Fields, chat: pb.ChatPrompt) -> ToolUse | None:
    """Adds all that the prompt is rendered from."""
    if "system" in fields and (system := _BILLING.sub("", _text_of(fields, "system"))):
        chat.messages.add(role="system", content=system)
    _add_messages(fields, chat)
    _clear_thoughts(fields, chat)
    _add_thinking(fields, chat)
    if (config := fields.nested("output_config")) is not None:
        add_effort(config, "effort", chat)
    return _add_tools(fields, chat)


def _add_thinking(fields: Fields, chat: pb.ChatPrompt) -> None:
    """Adds `thinking`. A budget is a target, as in Anthropic's API: only `max_tokens` bounds thoughts."""
    if (thinking := fields.nested("thinking")) is None:
        return
    match thinking.get("type"):
        case "disabled":
            thinking.check_names({"type"})
            chat.template_arguments["enable_thinking"] = "false"  # templates without it do not change
        case "adaptive":
            thinking.check_names({"type"}, {"display": ("summarized",)})  # the model thinks as it has learned
        case "enabled":
            thinking.check_names({"type", "budget_tokens"}, {"display": ("summarized",)})
            thinking.check_integer("budget_tokens", thinking.get("budget_tokens"), MIN_THINKING_BUDGET)
            chat.template_arguments["enable_thinking"] = "true"
        case kind:
            thinking.add_problem("type", f"must be disabled, adaptive or enabled, not {shown(kind)}")


def _clear_thoughts(fields: Fields, chat: pb.ChatPrompt) -> None:
    """Follows `context_management`, of which only the edit that clears thoughts is known."""
    management = fields.nested("context_management")
    if management is None:
        return
    management.check_names({"edits"})
    for edit in management.objects("edits", management.items("edits")):
        edit.check_names({"type", "keep"})
        if edit.get("type") != CLEAR_THOUGHTS:
            edit.add_problem("type", f"must be {CLEAR_THOUGHTS}, not {shown(edit.get('type'))}")
        elif edit.get("keep") not in ("all", {"type": "all"}):
            _keep_thoughts(_num_kept_turns(edit), chat)


def _num_kept_turns(edit: Fields) -> int:
    """Returns the number of turns whose thoughts stay: one, if the edit does not say."""
    keep = edit.nested("keep")
    if keep is None:
        return 1
    keep.check_names({"type", "value"})
    if keep.get("type") != "thinking_turns":
        keep.add_problem("type", f"must be thinking_turns or all, not {shown(keep.get('type'))}")
    return keep.integer("value", 1) or 1


def _keep_thoughts(num_turns: int, chat: pb.ChatPrompt) -> None:
    """Removes all thoughts but those of the last turns of the assistant that have any. Results of tools end no turn."""
    num_kept, is_in_turn = 0, False
    for before, message in reversed(list(pairwise([pb.ChatMessage(), *chat.messages]))):
        if message.role == "user":
            is_in_turn = is_in_turn and before.role == "tool"
        elif message.HasField("reasoning_content"):
            num_kept += not is_in_turn
            is_in_turn = True
            if num_kept > num_turns:
                message.ClearField("reasoning_content")


def _add_messages(fields: Fields, chat: pb.ChatPrompt) -> None:
    for message in each_message(fields):
        message.check_names({"role", "content"})
        role = message.get("role")
        if role == "system":  # by these words, Claude Code knows that it has to write user messages instead
            message.add_problem("role", "role 'system' is not supported on this model: only in the field system")
        elif role not in ("user", "assistant"):
            message.add_problem("role", f"must be user or assistant, not {shown(role)}")
        elif role == "user" and message.get("content") == []:
            message.add_problem("content", "must have at least one block")
        elif isinstance(message.get("content"), list):
            _add_blocks(message, role, chat)
        else:
            chat.messages.add(role=role, content=_text_of(message, "content"))
    if chat.messages and chat.messages[-1].role == "assistant":
        chat.continue_final_message = True  # in this API, an answer begins with the last message


def _add_blocks(message: Fields, role: str, chat: pb.ChatPrompt) -> None:
    """Adds the blocks of one message. Results of tools become messages of their own, before the text."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[pb.ToolCall] = []
    for block in message.objects("content", message.items("content")):
        match block.get("type"), role:
            case "text", _:
                block.check_names({"type", "text"}, _NEUTRAL_IN_TEXT)
                texts.append(block.required("text"))
            case "tool_use", "assistant":
                block.check_names({"type", "id", "name", "input"}, _NEUTRAL_IN_CALL)
                given = block.nested("input")
                arguments = json.dumps({} if given is None else given.values)
                call_id, name = block.required("id"), block.required_name()
                calls.append(pb.ToolCall(id=call_id, name=name, arguments=arguments))
            case "tool_result", "user":
                block.check_names({"type", "tool_use_id", "content", "is_error"}, CACHE_CONTROL)
                block.flag("is_error")
                result = _text_of(block, "content") if "content" in block else ""
                chat.messages.add(role="tool", content=result, tool_call_id=block.required("tool_use_id"))
            case "thinking", "assistant":
                block.check_names({"type", "thinking", "signature"})
                thoughts.append(block.required("thinking"))
            case kind, _:
                block.add_problem("type", f"must be text or a tool's block of this role, not {shown(kind)}")
    if texts or calls or role == "assistant":
        added = chat.messages.add(role=role, content="\n".join(texts), tool_calls=calls)
        if thoughts:
            added.reasoning_content = "\n".join(thoughts)


def _text_of(fields: Fields, name: str) -> str:
    return fields.joined_text(name, ("text",), _NEUTRAL_IN_TEXT)


def _add_tools(fields: Fields, chat: pb.ChatPrompt) -> ToolUse | None:
    tools = []
    for i, value in enumerate(fields.few_items("tools", MAX_TOOLS)):
        tool = Fields(value, f"tools[{i}].", fields.problems)
        tool.check_names({"name", "description", "input_schema", "type", "strict"}, _NEUTRAL_IN_TOOL)
        if tool.get("type") not in (None, "custom"):
            tool.add_problem("type", f'must be "custom", not {shown(tool.get("type"))}')
        tools.append(add_plain_tool(tool, "input_schema", chat))
    return anthropic_tool_use(fields, tools)
