"""Checks of a request's grammar, before it is compiled."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from quire.v1 import generation_pb2 as pb
from scheduler.core import FinishReason, InvalidRequest
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.intake import Intake, ServedModel
from scheduler.requests.limits import RequestLimits
from scheduler.requests.request_fields import RequestFields
from scheduler.servers.generation_server import read_fields
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.telemetry.request_observer import Caller
from scheduler.text.chat_messages import Chat, ChatMessage
from scheduler.text.grammars import GrammarCompiler, GrammarDefinition
from scheduler.text.tokenizer import Tokenizer
from tests.support.scheduler.fake_engine import MODEL, FakeEngine
from tests.support.scheduler.small_tokenizers import sentencepiece
from tests.support.scheduler.validator_rig import BOUNDS, LIMITS, Unread, check, request, violations

if TYPE_CHECKING:
    from scheduler.engine.engine import Engine
    from scheduler.text.chat import ChatRenderer

ABLE = replace(BOUNDS, has_grammars=True)
SMALL = RequestLimits(max_grammar_bytes=8, max_num_choices=3)
PATHS = {"choice": "structured_output.choice.texts"}


def with_grammar(kinds: dict[str, Any], **fields: Any) -> RequestFields:
    found = request(**fields)
    found.values["structured_output"] = True
    found.values |= {PATHS.get(kind, f"structured_output.{kind}"): value for kind, value in kinds.items()}
    return found


def definition(**kinds: Any) -> GrammarDefinition | None:
    return check(with_grammar(kinds), ABLE).grammar


def test_each_kind_has_a_definition() -> None:
    assert definition(json_schema="{}") == GrammarDefinition("json_schema", "{}")
    assert definition(json_object=True) == GrammarDefinition("json_schema", '{"type": "object"}')
    assert definition(regex="é+") == GrammarDefinition("regex", "é+")
    assert definition(lark='start: "a"') == GrammarDefinition("lark", 'start: "a"')
    assert definition(choice=["é", "", '"']) == GrammarDefinition("choice", '["é", "", "\\""]')
    assert check(request(), ABLE).grammar is None


@pytest.mark.parametrize(("kinds", "text"), [({}, "fox"), ({"choice": ["fox", " fox"]}, " fox")])
async def test_a_space_that_the_grammar_allowed_is_sent(kinds: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Without a grammar, the first space of an answer in a chat is one that such tokenizers always write."""
    pieces = sentencepiece()
    pieces.save(str(tmp_path / "tokenizer.json"))
    eos = pieces.token_to_id("</s>")
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", [eos])
    defaults = GenerationDefaults(eos_token_ids=(eos,))
    model = ServedModel(Tokenizer(pieces), cast("ChatRenderer", Renderer()), defaults, compiler)
    engine = FakeEngine(replace(MODEL, vocab_size=pieces.get_vocab_size(), has_grammars=True))
    chat = [ChatMessage("user", "hi")]
    asked = with_grammar(kinds, chat=chat) if kinds else request(chat=chat)
    try:
        async with Intake(cast("Engine", engine), model, SchedulerMetrics()).open(asked, Caller(), None) as stream:
            submitted = (await engine.next_request()).start()
            for piece in ("▁", "<0x66>", "o", "x"):
                submitted.emit([pieces.token_to_id(piece)])
            submitted.finish(FinishReason.EOS)
            assert "".join([message.delta.text async for message in stream.messages()]) == text
    finally:
        await compiler.close()
        model.tokenizer.close()


class Renderer:
    """A chat template that gives the content of the last message."""

    async def render(self, chat: Chat, *, tenant: str) -> str:
        return chat.messages[-1].content or ""


@pytest.mark.parametrize("kinds", [{}, {"regex": "a", "lark": "b"}, {"json_object": True, "choice": ["a"]}])
def test_exactly_one_kind_must_be_given(kinds: dict[str, Any]) -> None:
    assert list(violations(with_grammar(kinds), ABLE)) == ["structured_output"]


def test_a_kind_of_a_newer_release_is_refused_and_not_ignored() -> None:
    unknown = pb.StructuredOutput.FromString(b"\x32\x01a")  # field 6
    assert unknown.WhichOneof("grammar") is None
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), structured_output=unknown)
    assert list(violations(read_fields(message), ABLE)) == ["structured_output"]


@pytest.mark.parametrize(
    ("kind", "value", "path"),
    [
        ("json_schema", "", "json_schema"),
        ("json_schema", {"type": "object"}, "json_schema"),
        ("json_schema", "123456789", "json_schema"),
        ("json_object", False, "json_object"),
        ("json_object", "true", "json_object"),
        ("regex", "", "regex"),
        ("regex", "é" * 5, "regex"),
        ("regex", 5, "regex"),
        ("regex", "\ud800", "regex"),
        ("lark", "", "lark"),
        ("lark", "\udfff", "lark"),
        ("choice", [], "choice.texts"),
        ("choice", "abc", "choice.texts"),
        ("choice", {"texts": ["a"]}, "choice.texts"),
        ("choice", ["a", 5], "choice.texts[1]"),
        ("choice", ["a", None], "choice.texts[1]"),
        ("choice", ["\ud800"], "choice.texts[0]"),
        ("choice", ["123456789"], "choice.texts[0]"),
        ("choice", ["12345", "6789"], "choice.texts"),
        ("choice", ["a"] * 4, "choice.texts"),
    ],
)
def test_bad_definitions_are_violations(kind: str, value: Any, path: str) -> None:
    assert list(violations(with_grammar({kind: value}), ABLE, SMALL)) == [f"structured_output.{path}"]


def test_definitions_as_large_as_the_limits_are_accepted() -> None:
    assert (LIMITS.max_grammar_bytes, LIMITS.max_num_choices) == (256 << 10, 1024)
    assert definition(regex="a" * (256 << 10)) is not None
    assert definition(choice=["a" * 256] * 1024) is not None


def test_too_many_choices_are_not_looked_into() -> None:
    assert list(violations(with_grammar({"choice": Unread(["a"] * 2000)}), ABLE)) == ["structured_output.choice.texts"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"stopping": {"ignore_eos": True}}, "stopping.ignore_eos"),
        ({"stopping": {"min_tokens": 1}}, "stopping.min_tokens"),
        ({"sampling": {"allowed_token_ids": [5]}}, "sampling.allowed_token_ids"),
    ],
)
def test_fields_that_exclude_a_grammar(fields: dict[str, Any], path: str) -> None:
    assert list(violations(with_grammar({"regex": "a"}, **fields), ABLE)) == [path]


def test_other_fields_go_with_a_grammar() -> None:
    sampling = {"n": 3, "seed": 5, "logit_bias": {5: 1.0}, "frequency_penalty": 1.0, "allowed_token_ids": []}
    stopping = {"ignore_eos": False, "min_tokens": 0, "stop": ["x"], "stop_token_ids": [4]}
    output = {"logprobs": 3}
    assert check(with_grammar({"regex": "a"}, sampling=sampling, stopping=stopping, output=output), ABLE).grammar
    assert check(with_grammar({"regex": "a"}, sampling={"beam_width": 2, "n": 2}), ABLE).grammar


def test_an_executor_without_grammars_is_named() -> None:
    found = violations(with_grammar({"regex": "a"}), BOUNDS)
    assert found == {"structured_output": "the executor cannot follow grammars"}


def test_a_model_without_eos_cannot_end_a_grammar() -> None:
    with pytest.raises(Exception, match="EOS"):
        check(with_grammar({"regex": "a"}), ABLE, defaults=GenerationDefaults())


def test_the_grammar_is_part_of_the_parameters() -> None:
    checker = check(with_grammar({"regex": "a"}, sampling={"n": 2}), ABLE)
    made = checker.complete([1, 2, 3], ABLE, request_id=1, deadline_s=None, grammar="compiled")
    assert made.params.grammar == "compiled"


def test_an_executor_may_lose_its_grammars_while_one_is_compiled() -> None:
    checker = check(with_grammar({"regex": "a"}), ABLE)
    with pytest.raises(InvalidRequest, match="cannot follow grammars"):
        checker.complete([1, 2, 3], BOUNDS, request_id=1, deadline_s=None, grammar="compiled")
