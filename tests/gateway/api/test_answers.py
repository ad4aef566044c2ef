"""Messages of a scheduler become chunks and whole answers."""

import json
from typing import Any

import pytest

from gateway.api.chat import parse_chat
from gateway.api.completions import parse_completion
from gateway.api.endpoint import EchoedPrompt, Head, ParsedRequest
from gateway.api.logprobs import LegacyLogprobs
from quire.v1 import generation_pb2 as pb
from tests.support.gateway.fake_scheduler import delta, finished, logprob, started
from tests.support.gateway.rig import parsed_events

HEAD = Head("id-1", "m", 5)
EDGES = ['"quoted"', "back\\slash", "line\nfeed\r\t", "\u2028\u2029", "é😀", "</script>", "\0\x1f", "data: x\n\n"]


def chat(**fields: Any) -> ParsedRequest:
    return parse_chat({"messages": [{"role": "user", "content": "hi"}], "stream": True} | fields)


def events(parsed: ParsedRequest, *messages: pb.GenerateResponse) -> list[Any]:
    chunks = parsed.chunks(HEAD, ())
    return parsed_events("".join(chunks.encode(0, message) for message in messages) + chunks.end())


@pytest.mark.parametrize("text", EDGES)
def test_any_text_survives_in_chunks(text: str) -> None:
    found = events(chat(), started(), delta(0, text, 1))
    assert found[1]["choices"][0]["delta"]["content"] == text
    completion = events(parse_completion({"prompt": "a", "stream": True}), started(), delta(0, text, 1))
    assert completion[0]["choices"][0]["text"] == text


def test_chunks_are_those_of_the_template() -> None:
    _, chunk, end, done = events(chat(), started(), delta(0, "a", 1), finished(0, 1))
    head = {"id": "id-1", "object": "chat.completion.chunk", "created": 5, "model": "m"}
    choice = {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}
    assert chunk == head | {"choices": [choice]}
    assert end == head | {"choices": [choice | {"delta": {}, "finish_reason": "stop"}]}
    assert done == "[DONE]"


def test_tokens_without_text_send_no_chunk() -> None:
    """A part of a character, or text that may become a stop string, is held back by the scheduler."""
    assert len(events(chat(), started(), delta(0, "", 1), finished(0, 1))) == 3
    with_logprobs = events(chat(logprobs=True), started(), delta(0, "", 1, logprobs=True), finished(0, 1))
    assert len(with_logprobs) == 4
    assert with_logprobs[1]["choices"][0]["delta"] == {"content": ""}


def test_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(chat(stream_options=options), started(), delta(0, "a", 1, 2), delta(0, "b", 3), finished(0, 3))
    assert [event["usage"]["completion_tokens"] for event in found[:-1]] == [0, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (pb.FINISH_REASON_EOS, "stop"),
        (pb.FINISH_REASON_STOP, "stop"),
        (pb.FINISH_REASON_LENGTH, "length"),
    ],
)
def test_finish_reasons(reason: pb.FinishReason.ValueType, name: str) -> None:
    end = finished(0, 1, reason)
    assert events(chat(), started(), end)[-2]["choices"][0]["finish_reason"] == name
    for parsed in (chat(), parse_completion({"prompt": "a"})):
        collector = parsed.collector(HEAD, ())
        for message in (started(), delta(0, "a", 1), end):
            collector.add(0, message)
        assert collector.body()["choices"][0]["finish_reason"] == name


def test_prompt_logprobs_as_in_vllm() -> None:
    prompt = pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(first_position=1, tokens=[logprob(7, -0.5)]))
    first = {"logprob": -0.5, "rank": 1, "decoded_token": "<7>"}
    other = {"logprob": -1.5, "rank": 2, "decoded_token": "bytes:\\xe2\\x80"}
    for parsed, is_chat in (
        (chat(stream=False, prompt_logprobs=2), True),
        (parse_completion({"prompt": "a", "prompt_logprobs": 2}), False),
    ):
        collector = parsed.collector(HEAD, ())
        for message in (started(), prompt, delta(0, "a", 1), finished(0, 1)):
            collector.add(0, message)
        body = collector.body()
        holder = body if is_chat else body["choices"][0]
        assert holder["prompt_logprobs"] == [None, {"7": first, "999": other}]


@pytest.mark.parametrize(("num_top", "num_prompt_top"), [(0, 2), (1, 2), (2, 0), (2, 1)])
def test_an_echo_with_both_kinds_of_logprobs_has_as_many_tokens_as_each_asks_for(
    num_top: int, num_prompt_top: int
) -> None:
    """The scheduler is asked for the larger number. The token of the prompt itself is not among the most probable."""
    parsed = parse_completion({"prompt": "ab", "echo": True, "logprobs": num_top, "prompt_logprobs": num_prompt_top})
    (request,) = parsed.requests
    assert request.output.prompt_logprobs == 2
    token = pb.TokenLogprobs(chosen=pb.TokenLogprob(token_id=7, logprob=-9, bytes=b"b"))
    token.top.add(token_id=1, logprob=-1, bytes=b"c")
    token.top.add(token_id=2, logprob=-2, bytes=b"d")
    collector = parsed.collector(HEAD, [EchoedPrompt("ab", "a")])
    prompt = pb.PromptLogprobs(first_position=1, tokens=[token])
    for message in (started(), pb.GenerateResponse(prompt_logprobs=prompt), finished(0, 0)):
        collector.add(0, message)
    (choice,) = collector.body()["choices"]
    assert list(choice["logprobs"]["top_logprobs"][1]) == [*["c", "d"][:num_top], "b"]
    assert list(choice["prompt_logprobs"][1]) == ["7", *["1", "2"][:num_prompt_top]]


def test_log_probabilities_that_json_cannot_express() -> None:
    parsed = parse_completion({"prompt": "a", "logprobs": 1})
    collector = parsed.collector(HEAD, ())
    message = delta(0, "a", 1, logprobs=True)
    message.delta.logprobs[0].chosen.logprob = float("-inf")
    for each in (started(), message, finished(0, 1)):
        collector.add(0, each)
    body = json.loads(json.dumps(collector.body(), allow_nan=False))
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_offsets_of_streamed_choices_go_on_after_the_prompt() -> None:
    parsed = parse_completion({"prompt": "ab", "echo": True, "logprobs": 0, "stream": True, "n": 2})
    chunks = parsed.chunks(HEAD, [EchoedPrompt("ab", "a")])
    prompt = pb.PromptLogprobs(first_position=1, tokens=[logprob(7, -0.5, b"b")])
    messages = [started(), pb.GenerateResponse(prompt_logprobs=prompt)]
    messages += [delta(i, text, 1, logprobs=True) for text in ("c", "d") for i in (0, 1)]
    found = parsed_events("".join(chunks.encode(0, message) for message in messages))
    for index in (0, 1):
        mine = [c for e in found for c in e["choices"] if c["index"] == index]
        assert [offset for c in mine for offset in c["logprobs"]["text_offset"]] == [0, 1, 2, 3]
        assert "".join(c["text"] for c in mine) == "abcd"


@pytest.mark.parametrize(
    ("text", "first", "others", "offsets", "shown"),
    [
        # Sentencepiece writes a space before the first word, which the text does not have.
        ("Hi you", "<s>", [b" Hi", b" you"], [0, 0, 2], "<s>"),
        (" Hi you", "<s>", [b" ", b" Hi", b" you"], [0, 0, 0, 3], "<s>"),
        ("<s> Hi you", "<s>", [b" Hi", b" you"], [0, 3, 6], "<s>"),
        ("Hi you", "Hi", [b" you"], [0, 2], "Hi"),
        # The first token is a part of the first character.
        ("😀 hi", "�", [b"\x9f", b"\x98\x80", b" hi"], [0, 0, 0, 1], r"bytes:\xf0"),
        (" é", " �", [b"\xa9"], [0, 1], r"bytes:\x20\xc3"),
        ("� hi", "�", [b" hi"], [0, 1], "�"),
        # The bytes are not those of the text.
        ("Hi you", "hi", [b"##you"], [0, 0], "hi"),
    ],
)
def test_text_offsets_of_an_echoed_prompt(
    text: str, first: str, others: list[bytes], offsets: list[int], shown: str
) -> None:
    """Those of the generated tokens begin where the prompt ends, in any case."""
    parsed = parse_completion({"prompt": text, "echo": True, "logprobs": 0})
    collector = parsed.collector(HEAD, [EchoedPrompt(text, first)])
    prompt = pb.PromptLogprobs(first_position=1, tokens=[logprob(7, -0.5, each) for each in others])
    for message in (
        started(),
        pb.GenerateResponse(prompt_logprobs=prompt),
        delta(0, "é", 1, logprobs=True),
        delta(0, "!", 2, logprobs=True),
    ):
        collector.add(0, message)
    found = collector.body()["choices"][0]["logprobs"]
    assert found["tokens"][0] == shown
    assert found["text_offset"] == [*offsets, len(text), len(text) + 1]


def test_text_offsets_count_the_characters_of_the_text() -> None:
    """A part of a character is shown by its bytes, which are not in the text."""
    parts = [b"I ", b"\xf0\x9f", b"\x98", b"\x80", b" you", b"!"]
    entries = LegacyLogprobs()
    entries.add(pb.TokenLogprobs(chosen=pb.TokenLogprob(token_id=1, logprob=-1, bytes=part)) for part in parts)
    taken = entries.take()
    assert taken["tokens"][1] == r"bytes:\xf0\x9f"
    assert taken["text_offset"] == [0, 2, 2, 2, 3, 7]
    assert b"".join(parts).decode()[3:] == " you!"
