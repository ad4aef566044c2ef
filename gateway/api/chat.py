"""POST /v1/chat/completions: the body as a request to a scheduler."""

from collections.abc import Sequence

from gateway.api.chat_answer import ChatChunks, ChatCollector
from gateway.api.chat_calls import CallChunks, CallCollector
from gateway.api.endpoint import EchoedPrompt, Head, ParsedRequest
from gateway.api.fields import Fields
from gateway.api.messages import add_messages, add_template_options, add_tools
from gateway.api.sampling import IGNORED, NAMES, NEUTRAL, SHARED, StreamOptions, shared_request
from gateway.api.structured_output import add_structured_output
from gateway.api.tool_calls import GRAMMAR_NAMES, names_of_forced

KNOWN = SHARED | {
    "messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "chat_template_kwargs", "reasoning_effort", "continue_final_message", "add_generation_prompt",
}  # fmt: skip

CHAT_NEUTRAL = NEUTRAL | {
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "echo": (False,),
    "best_of": (1,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "chat_template": (),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
}

_NAMES = (
    NAMES
    | GRAMMAR_NAMES
    | {
        "prompt": "messages",
        "chat": "messages",
        "chat.messages": "messages",
        "chat.tools": "tools",
        "chat.template_arguments": "chat_template_kwargs",
        "chat.continue_final_message": "continue_final_message",
        "output.logprobs": "top_logprobs",
    }
)


def parse_chat(body: object) -> ParsedRequest:
    """Returns the request. Raises ApiError that names every bad field."""
    fields = Fields(body)
    fields.raise_problems()
    fields.check_names(KNOWN | IGNORED, CHAT_NEUTRAL)
    model = fields.text("model", "") or ""
    options = StreamOptions(fields)
    request = shared_request(fields)
    names = _NAMES | add_structured_output(fields, request)
    add_messages(fields, request.chat)
    tools = add_tools(fields, request.chat)
    add_template_options(fields, request.chat)
    max_name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    bounds = {name: fields.integer(name) for name in ("max_tokens", "max_completion_tokens")}
    if (max_tokens := bounds[max_name]) is not None:
        request.stopping.max_tokens = max_tokens
    has_logprobs = fields.flag("logprobs")
    num_top = fields.integer("top_logprobs")
    if num_top and not has_logprobs:
        fields.add_problem("top_logprobs", "is allowed only if logprobs is true")
    if has_logprobs:
        request.output.logprobs = num_top or 0
        request.output.token_bytes = True
    if options.is_streamed and "prompt_logprobs" in fields:
        fields.add_problem("prompt_logprobs", "is not available with stream")
    fields.raise_problems()

    def chunks(head: Head, _: Sequence[EchoedPrompt]) -> ChatChunks:
        if head.tools is not None:
            return CallChunks(head, options, head.tools, has_logprobs=has_logprobs)
        return ChatChunks(head, options, has_logprobs=has_logprobs)

    def collector(head: Head, _: Sequence[EchoedPrompt]) -> ChatCollector:
        if head.tools is not None:
            return CallCollector(head, head.tools, has_logprobs=has_logprobs)
        return ChatCollector(head, has_logprobs=has_logprobs)

    names |= {"stopping.max_tokens": max_name} | names_of_forced(tools)
    return ParsedRequest(model, [request], names, "chatcmpl-", options.is_streamed, chunks, collector, tools=tools)
