"""Conversion of prompts, options and events."""

from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

import quire
from quire.messages import CompletionAssembler, event, generate_request
from quire.options import GenerateOptions
from quire.status_details import status_details
from quire.v1 import generation_pb2

EVERY_OPTION: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 3,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.75,
    "presence_penalty": -0.5,
    "seed": 2**64 - 1,
    "n": 4,
    "beam_width": 2,
    "logit_bias": {7: -1.5},
    "allowed_token_ids": [1, 2],
    "length_penalty": -0.5,
    "early_stopping": True,
    "max_tokens": 5,
    "min_tokens": 1,
    "stop": ["a", "b"],
    "stop_token_ids": (8, 9),
    "ignore_eos": True,
    "include_stop": False,
    "logprobs": 2,
    "prompt_logprobs": 0,
    "token_bytes": True,
    "special_tokens": True,
    "request_id": "me",
    "priority": -3,
    "cache_salt": "salt",
}


GRAMMARS = set(generation_pb2.StructuredOutput.DESCRIPTOR.fields_by_name)


def test_every_option_reaches_its_field() -> None:
    request = generate_request("p", EVERY_OPTION)
    assert set(EVERY_OPTION) | GRAMMARS == set(GenerateOptions.__annotations__)
    for name, value in EVERY_OPTION.items():
        holders = [part for part in (request, request.sampling, request.stopping, request.output) if _has(part, name)]
        assert len(holders) == 1, name
        sent = getattr(holders[0], name)
        assert (dict(sent) if name == "logit_bias" else _plain(sent)) == _plain(value), name
        if name == "include_stop":
            assert request.stopping.HasField(name)  # an explicit False differs from an absent option


def test_every_parameter_of_the_protocol_is_an_option() -> None:
    parameters = set()
    for message in (generation_pb2.SamplingParams, generation_pb2.StoppingParams, generation_pb2.OutputParams):
        parameters |= set(message.DESCRIPTOR.fields_by_name)
    assert parameters | GRAMMARS | {"request_id", "priority", "cache_salt"} == set(GenerateOptions.__annotations__)


def test_absent_options_and_none_are_not_sent() -> None:
    request = generate_request("p", {"temperature": None, "max_tokens": None, "stop": None})
    assert request == generation_pb2.GenerateRequest(text="p")
    assert not request.HasField("sampling")


def test_one_stop_string_is_a_list_of_one() -> None:
    assert list(generate_request("p", {"stop": "END"}).stopping.stop) == ["END"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("héllo", generation_pb2.GenerateRequest(text="héllo")),
        ("", generation_pb2.GenerateRequest(text="")),
        ([5, 6], generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[5, 6]))),
        ((5,), generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[5]))),
        ([], generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds())),
        (
            [quire.ChatMessage("user", "hi"), {"role": "assistant", "content": "yes"}],
            generation_pb2.GenerateRequest(
                chat=generation_pb2.ChatPrompt(
                    messages=[
                        generation_pb2.ChatMessage(role="user", content="hi"),
                        generation_pb2.ChatMessage(role="assistant", content="yes"),
                    ]
                )
            ),
        ),
    ],
)
def test_prompts(prompt: Any, expected: generation_pb2.GenerateRequest) -> None:
    request = generate_request(prompt, {})
    assert request == expected
    assert request.WhichOneof("prompt") == expected.WhichOneof("prompt") is not None


@pytest.mark.parametrize("prompt", [None, 3, b"bytes", {"role": "user", "content": "x"}, [{"role": "user"}]])
def test_other_types_of_prompts_are_type_errors(prompt: Any) -> None:
    with pytest.raises(TypeError):
        generate_request(prompt, {})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"json_schema": {"type": "integer", "title": "é"}},
            {"json_schema": '{"type": "integer", "title": "\\u00e9"}'},
        ),
        ({"json_schema": '{"type":"null"}'}, {"json_schema": '{"type":"null"}'}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["yes", ""]}, {"choice": generation_pb2.StructuredOutput.Choices(texts=["yes", ""])}),
        ({"choice": []}, {"choice": generation_pb2.StructuredOutput.Choices()}),
        ({"lark": 'start: "a"'}, {"lark": 'start: "a"'}),
        ({"json_object": False, "regex": "a"}, {"regex": "a"}),
    ],
)
def test_grammars(options: dict[str, Any], expected: dict[str, Any]) -> None:
    output = generation_pb2.StructuredOutput(**expected)
    assert generate_request("p", options) == generation_pb2.GenerateRequest(text="p", structured_output=output)


def test_no_grammar_is_sent_unless_one_is_given() -> None:
    options = {"json_object": False, "json_schema": None, "regex": None, "choice": None}
    assert not generate_request("p", options).HasField("structured_output")


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no option 'temprature'; did you mean 'temperature'"):
        generate_request("p", {"temprature": 1.0})


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([1, -1], {}, "token_ids"),
        ([2**32], {}, "token_ids"),
        (["a"], {}, "token_ids"),
        ("lone \ud800 surrogate", {}, "text"),
        ([{"role": "user", "content": 5}], {}, "chat.messages[0].content"),
        ("p", {"top_k": -1}, "sampling.top_k"),
        ("p", {"temperature": "hot"}, "sampling.temperature"),
        ("p", {"seed": 2**64}, "sampling.seed"),
        ("p", {"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ("p", {"max_tokens": 1.5}, "stopping.max_tokens"),
        ("p", {"stop": [b"\xff"]}, "stopping.stop"),
        ("p", {"cache_salt": 7}, "cache_salt"),
        ("p", {"cache_salt": b"salt"}, "cache_salt"),
        ("p", {"temperature": [0.5]}, "sampling.temperature"),
        ("p", {"temperature": {}}, "sampling.temperature"),
        ("p", {"temperature": 10**400}, "sampling.temperature"),
        ("p", {"stop_token_ids": 5}, "stopping.stop_token_ids"),
        ("p", {"stop_token_ids": {5: 1}}, "stopping.stop_token_ids"),
        ("p", {"logit_bias": 1.0}, "sampling.logit_bias"),
        ("p", {"logit_bias": [(5, 1.0)]}, "sampling.logit_bias"),
        ([{"role": "user", "content": ["x"]}], {}, "chat.messages[0].content"),
        ("p", {"regex": "a", "lark": "start: x"}, "structured_output"),
        ("p", {"json_schema": {"enum": {1, 2}}}, "structured_output.json_schema"),
        ("p", {"json_schema": ["a"]}, "structured_output.json_schema"),
        ("p", {"json_object": "yes"}, "structured_output.json_object"),
        ("p", {"regex": "\ud800"}, "structured_output.regex"),
        ("p", {"choice": ["a", 5]}, "structured_output.choice.texts"),
        ("p", {"choice": 5}, "structured_output.choice.texts"),
    ],
)
def test_values_that_cannot_be_sent_are_violations_by_field(prompt: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(quire.InvalidRequestError) as raised:
        generate_request(prompt, options)
    assert list(raised.value.violations) == [field]
    assert field in str(raised.value)


def test_logprobs_arrive() -> None:
    message = generation_pb2.GenerateResponse(
        delta=generation_pb2.Delta(
            index=1,
            text="x",
            token_ids=[4],
            logprobs=[
                generation_pb2.TokenLogprobs(
                    chosen=generation_pb2.TokenLogprob(token_id=4, logprob=-0.5, rank=2),
                    top=[generation_pb2.TokenLogprob(token_id=5, logprob=-0.25, rank=1)],
                )
            ],
        )
    )
    logprobs = quire.TokenLogprobs(quire.TokenLogprob(4, -0.5, 2), (quire.TokenLogprob(5, -0.25, 1),))
    assert event(message) == quire.Delta(1, "x", (4,), (logprobs,))


def test_prompt_logprobs_and_scores_arrive() -> None:
    prompt = generation_pb2.GenerateResponse(
        prompt_logprobs=generation_pb2.PromptLogprobs(
            first_position=1,
            tokens=[generation_pb2.TokenLogprobs(chosen=generation_pb2.TokenLogprob(token_id=4, logprob=-2, rank=9))],
        )
    )
    logprobs = quire.TokenLogprobs(quire.TokenLogprob(4, -2.0, 9))
    assert event(prompt) == quire.PromptLogprobs(1, (logprobs,))
    end = generation_pb2.Finished(index=1, reason=generation_pb2.FINISH_REASON_EOS)
    usage = quire.Usage(0, 0, 0, 0)
    without = event(generation_pb2.GenerateResponse(finished=end))
    assert without == quire.Finished(1, quire.FinishReason.EOS, usage, None)
    end.score = 0.0
    with_score = event(generation_pb2.GenerateResponse(finished=end))
    assert with_score == quire.Finished(1, quire.FinishReason.EOS, usage, 0.0)


def test_a_completion_has_the_prompts_logprobs_and_the_scores() -> None:
    def entry(token_id: int) -> quire.TokenLogprobs:
        return quire.TokenLogprobs(quire.TokenLogprob(token_id, -1.0, 1))

    assembler = CompletionAssembler()
    usage = quire.Usage(3, 2, 0, 0)
    for one in (
        quire.Started("r", 3, 0),
        quire.PromptLogprobs(1, (entry(5),)),
        quire.PromptLogprobs(2, (entry(6),)),
        quire.Delta(0, "a", (7,), (entry(7),)),
        quire.Delta(0, "b", (8,), (entry(8),)),
        quire.Finished(0, quire.FinishReason.LENGTH, usage, -0.5),
    ):
        assembler.add(one)
    completion = assembler.completion()
    assert [each.chosen.token_id for each in completion.prompt_logprobs] == [5, 6]
    assert [each.chosen.token_id for each in completion.sequences[0].logprobs] == [7, 8]
    assert completion.sequences[0].score == -0.5


def test_unreadable_status_details_count_as_none() -> None:
    assert status_details(b"\xff\xff\xff").violations == {}
    details = AnyMessage()
    details.Pack(RetryInfo(retry_delay=Duration(seconds=10**15)))  # more than a timedelta holds
    assert status_details(Status(details=[details]).SerializeToString()).retry_after_s is None
    assert status_details(b"").retry_after_s is None


def _has(message: Any, name: str) -> bool:
    return name in message.DESCRIPTOR.fields_by_name


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | dict) or not hasattr(value, "__iter__") else list(value)
