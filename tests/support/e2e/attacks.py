"""Requests that broke other servers, and unusual ones that are valid, as messages and as JSON."""

from typing import Any

from google.protobuf.message import Message

from quire.v1 import generation_pb2 as pb

V = 1664
"""Vocabulary size of the embedded checkpoint."""

NAN, INF = float("nan"), float("inf")
HUGE = 2**32 - 1


def as_json(message: Any) -> dict[str, Any]:
    """Returns a message as JSON values; Python's json writes and reads NaN and the infinities."""
    return {field.name: _json_value(value) for field, value in message.ListFields()}


def _json_value(value: Any) -> Any:
    if isinstance(value, Message):
        return as_json(value)
    return value if isinstance(value, str | int | float) else [_json_value(item) for item in value]


def can_be_json(request: pb.GenerateRequest) -> bool:
    fields = {field.name for field, _ in request.ListFields()}
    return fields <= {"text", "chat", "request_id", "sampling", "stopping"} and not request.sampling.logit_bias


def sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="A fox", sampling=pb.SamplingParams(**fields))


def stopping(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="A fox", stopping=pb.StoppingParams(**fields))


def output(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="A fox", output=pb.OutputParams(**fields))


BAD_IDS = (V, V + 1, HUGE)
FLOATS = (NAN, INF, -INF, 3.4e38, -3.4e38)
FLOAT_FIELDS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "length_penalty",
)  # fmt: skip
ATTACKS: list[pb.GenerateRequest] = [
    *(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, bad])) for bad in BAD_IDS),
    *(stopping(stop_token_ids=[bad]) for bad in BAD_IDS),
    *(sampling(logit_bias={bad: 1.0}) for bad in BAD_IDS),
    *(sampling(allowed_token_ids=[5, bad]) for bad in BAD_IDS),
    *(sampling(logit_bias={5: value}) for value in FLOATS),
    *(sampling(**{name: value}) for name in FLOAT_FIELDS for value in FLOATS),
    *(sampling(beam_width=2, length_penalty=value) for value in FLOATS),
    sampling(repetition_penalty=0),
    sampling(repetition_penalty=1e-45),
    sampling(n=0),
    *(sampling(n=number) for number in (9, HUGE)),
    *(sampling(beam_width=number) for number in (9, 65, HUGE)),
    sampling(beam_width=2, n=3),
    sampling(beam_width=2, seed=1),
    sampling(logit_bias=dict.fromkeys(range(1025), 1.0)),
    sampling(allowed_token_ids=[5] * 65537),
    *(output(logprobs=number) for number in (21, HUGE)),
    *(output(prompt_logprobs=number) for number in (21, HUGE)),
    stopping(min_tokens=HUGE),
    stopping(max_tokens=HUGE),
    stopping(min_tokens=3, max_tokens=2),
    stopping(max_tokens=0),
    stopping(stop=["x"] * 17),
    stopping(stop_token_ids=[5] * 65),
    pb.GenerateRequest(text="a" * 10_000_000),
    pb.GenerateRequest(text="\u0301" * 5_000_000),
    pb.GenerateRequest(text="A fox", cache_salt="s" * 2**20),
    pb.GenerateRequest(text="A fox", request_id="a\x00b"),
    pb.GenerateRequest(text="A fox", request_id="r" * 2**20),
    pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")] * 2000)),
    pb.GenerateRequest(),
]
# Unusual requests that are valid.
HARMLESS: list[pb.GenerateRequest] = [
    pb.GenerateRequest(text="\x00\x01", stopping=pb.StoppingParams(max_tokens=2)),
    pb.GenerateRequest(text="A fox", cache_salt="\x00" * 256, stopping=pb.StoppingParams(max_tokens=2)),
    pb.GenerateRequest(text="{{ 7 * 7 }}{% for x in y %}", stopping=pb.StoppingParams(max_tokens=2)),
    pb.GenerateRequest(token_ids=pb.TokenIds(ids=[V - 1]), stopping=pb.StoppingParams(max_tokens=2)),
    pb.GenerateRequest(
        text="A fox",
        sampling=pb.SamplingParams(
            logit_bias=dict.fromkeys(range(1000), -100), repetition_penalty=10, top_p=1e-30, top_k=HUGE
        ),
        stopping=pb.StoppingParams(max_tokens=3),
    ),
]  # fmt: skip

# Requests that protobuf cannot express: numbers outside float32, values of wrong types, unknown keys.
JSON_ATTACKS: list[dict[str, Any]] = [
    *({"sampling": {"top_p": value}} for value in (1e-50, 7e-46, 1e300, -1e-50, "0.5", True, [0.5], {})),
    *({"sampling": {"temperature": value}} for value in (1e300, 10**400, "hot", [[[0.5]]])),
    *({"sampling": {"seed": value}} for value in (2**64, -1, 1.5)),
    {"sampling": {"n": 1.0}},
    {"sampling": {"allowed_token_ids": [-1]}},
    {"stopping": {"stop_token_ids": [2**64]}},
    {"stopping": {"stop": [{}]}},
    {"request_id": [0] * 1_000_000},
    {"sampling": {"seed": [{}] * 1_000_000}},
    {"sampling": {f"{number}": number for number in range(100_000)}},
    {"text": None, "chat": {"messages": [{}] * 1_000_000}},
    {"text": None, "chat": {"messages": [{f"{number}": 1 for number in range(100)}] * 1000}},
]
HARMLESS_JSON: list[dict[str, Any]] = [
    {"sampling": {"temperature": 1e-50, "min_p": 1e-50, "repetition_penalty": 1.1, "frequency_penalty": -1e-50}},
    {"sampling": {"top_p": 1e-45, "presence_penalty": 0.1}},
    {"sampling": {"beam_width": 2, "length_penalty": 0.1}},
]
