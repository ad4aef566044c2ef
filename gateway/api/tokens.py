"""POST /tokenize and /detokenize, GET /tokenizer_info: the bodies and the answers, with vLLM's fields."""

from typing import Any

from gateway.api.fields import Fields
from gateway.api.logprobs import token_text
from gateway.api.messages import add_messages, add_template_options, add_tools
from quire.v1 import tokenization_pb2 as pb

NAMES = {
    **dict.fromkeys(("prompt", "text"), "prompt"),
    **dict.fromkeys(("chat", "chat.messages"), "messages"),
    "chat.tools": "tools",
    "chat.template_arguments": "chat_template_kwargs",
    "token_ids": "tokens",
    "return_bytes": "return_token_strs",
}
"""The JSON name of each field of the requests."""

_CHAT = {"messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"}


def parse_tokenize(body: object) -> tuple[str, pb.TokenizeRequest]:
    """Returns the model and the request. Raises ApiError."""
    fields = Fields(body)
    fields.raise_problems()
    fields.check_names({"model", "prompt", "add_special_tokens", "return_token_strs"} | _CHAT)
    request = pb.TokenizeRequest()
    if ("prompt" in fields) == ("messages" in fields):
        fields.add_problem("prompt", "must be given, or messages, but not both")
    elif "prompt" in fields:
        request.text = fields.text("prompt") or ""
        request.add_special_tokens = fields.flag("add_special_tokens", default=True)
    else:
        add_messages(fields, request.chat)
        add_tools(fields, request.chat)
        add_template_options(fields, request.chat)
        if fields.flag("add_special_tokens"):
            fields.add_problem("add_special_tokens", "must be false with messages: the chat template writes its own")
    request.return_bytes = fields.flag("return_token_strs")
    model = fields.text("model", "") or ""
    fields.raise_problems()
    return model, request


def tokenized(response: pb.TokenizeResponse, *, has_strings: bool) -> dict[str, Any]:
    return {
        "count": len(response.token_ids),
        "max_model_len": response.max_model_len,
        "tokens": list(response.token_ids),
        "token_strs": [token_text(token) for token in response.tokens] if has_strings else None,
    }


def parse_detokenize(body: object) -> tuple[str, pb.DetokenizeRequest]:
    """Returns the model and the request. Raises ApiError."""
    fields = Fields(body)
    fields.raise_problems()
    fields.check_names({"model", "tokens"})
    if "tokens" not in fields:
        fields.add_problem("tokens", "must be given")
    request = pb.DetokenizeRequest(token_ids=fields.token_ids("tokens"))
    model = fields.text("model", "") or ""
    fields.raise_problems()
    return model, request


def tokenizer_info(response: pb.GetTokenizerInfoResponse, max_model_len: int) -> dict[str, Any]:
    """Returns the special tokens by role, as in tokenizer_config.json, and what else the scheduler knows."""
    info: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_model_len,
        "eos_token_ids": list(response.eos_token_ids),
        **dict(response.special_tokens),
    }
    if response.HasField("chat_template"):
        info["chat_template"] = response.chat_template
    return info
