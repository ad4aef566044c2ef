"""Grammars accept the calls that readers read, and no others."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.tools.formats import FORMATS
from gateway.tools.tool_use import Tool, ToolUse
from quire.grammars import grammar_tokenizer, matcher
from scheduler.text.grammar_worker import checked_grammar
from tests.gateway.tools.texts import TIME, USE, WEATHER, calls, one_call, read

NAMES = sorted(FORMATS)
STRICT = Tool("weather", WEATHER.parameters, is_strict=True)
FORCED = ToolUse((WEATHER, TIME), is_forced=True)
ONE = ToolUse((WEATHER, TIME), is_forced=True, allows_several=False)
NAMED = ToolUse((WEATHER, TIME), is_forced=True, allowed=frozenset({"weather"}), allows_several=False)
ALLOWED = ToolUse((WEATHER, TIME), allowed=frozenset({"weather"}))
ALLOWED_FORCED = ToolUse((WEATHER, TIME), is_forced=True, allowed=frozenset({"weather"}))
FREE = ToolUse((STRICT, TIME))
FREE_ONE = ToolUse((WEATHER, TIME), allows_several=False)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"$ref": "#/$defs/n"}},
    "required": ["name", "n"],
    "$defs": {"n": {"type": "integer"}},
}
TOKENS = sorted({token for each in FORMATS.values() for token in (*each.markers, *each.passed)})


@cache
def tokenizer(*, has_tokens: bool) -> Tokenizer:
    """Returns a vocabulary of bytes and of some longer pieces, with or without the markers of all formats."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("{", '"'), ('"', "}"), ('"', ":"), ('":', "Ġ"), ('":Ġ', '{"'), ("}", "}"), ('"}', "}"), ("n", "a")]
    words = [*alphabet, *(a + b for a, b in merges)]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<eos>", special=True)])
    if has_tokens:
        made.add_tokens([AddedToken(each, special=not each.startswith("<t"), normalized=False) for each in TOKENS])
    return made


@cache
def followed(*, has_tokens: bool) -> tuple[Tokenizer, LLTokenizer, Mapping[str, int]]:
    made = tokenizer(has_tokens=has_tokens)
    grammars = grammar_tokenizer(made.to_str(), made.get_vocab_size(), [made.token_to_id("<eos>")])
    return made, grammars, {each: made.token_to_id(each) for each in TOKENS} if has_tokens else {}


def accepts(name: str, use: ToolUse, text: str, *, has_tokens: bool) -> bool:
    made, grammars, tokens = followed(has_tokens=has_tokens)
    lark = FORMATS[name].grammar(use, tokens)
    follower = matcher(grammars, json.dumps({"grammars": [{"lark_grammar": lark}]}))
    assert follower.get_error() == "", lark
    ids = made.encode(text, add_special_tokens=False).ids
    return follower.try_consume_tokens(ids) == len(ids) and follower.is_accepting()


def output(name: str, *parts: str) -> str:
    """Returns the calls, as a model of the format writes one after the other. EOS is not a part of it."""
    if name == "harmony":
        return "<|end|><|start|>assistant".join(part.removesuffix("<|call|>") for part in parts)
    return {"llama3": "; ", "hermes": "\n"}.get(name, "\n").join(parts)


both = pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
each = pytest.mark.parametrize("name", NAMES)


@both
@each
def test_required(name: str, has_tokens: bool) -> None:
    rome, time = one_call(name), one_call(name, "{}", "get_time")
    assert accepts(name, FORCED, output(name, rome), has_tokens=has_tokens)
    assert accepts(name, FORCED, output(name, time), has_tokens=has_tokens)
    assert accepts(name, FORCED, output(name, rome, time, rome), has_tokens=has_tokens)
    for text in ("", "Hi.", output(name, rome)[:-4], output(name, one_call(name, tool="other"))):
        assert not accepts(name, FORCED, text, has_tokens=has_tokens)


@both
@each
@pytest.mark.parametrize("arguments", ["{}", '{"city": 5}', '{"city": "a", "x": 1}', "[]", '"city"', '{"city": "a"'])
def test_arguments_keep_to_the_schema(name: str, has_tokens: bool, arguments: str) -> None:
    assert not accepts(name, FORCED, output(name, one_call(name, arguments)), has_tokens=has_tokens)
    assert not accepts(name, FREE, output(name, one_call(name, arguments)), has_tokens=has_tokens)


@both
@each
@pytest.mark.parametrize("arguments", ['{"city":"Rome"}', '{\n  "city": "Rome"\n}', '{"city": "a \\" } \\n é 😀"}'])
def test_arguments_may_be_compact_or_indented(name: str, has_tokens: bool, arguments: str) -> None:
    text = output(name, one_call(name, arguments))
    for use in (FORCED, ONE, NAMED, FREE, FREE_ONE):
        assert accepts(name, use, text, has_tokens=has_tokens)
    assert calls(read(name, text)) == [("weather", arguments)]


@each
def test_deep_arguments_may_be_indented(name: str) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    value: Any = 5
    for _ in range(7):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        value = {"a": value}
    use = ToolUse((Tool("weather", schema, is_strict=True),), is_forced=True)
    for indent in (None, 2, 4):
        text = output(name, one_call(name, json.dumps(value, indent=indent)))
        assert accepts(name, use, text, has_tokens=True)


@both
@each
def test_white_space_is_bounded(name: str, has_tokens: bool) -> None:
    text = output(name, one_call(name, '{"city":' + " " * 100 + '"Rome"}'))
    assert not accepts(name, FORCED, text, has_tokens=has_tokens)


@both
@each
def test_exactly_one_call(name: str, has_tokens: bool) -> None:
    rome = one_call(name)
    assert accepts(name, ONE, output(name, rome), has_tokens=has_tokens)
    assert not accepts(name, ONE, output(name, rome, rome), has_tokens=has_tokens)


@both
@each
def test_a_named_tool(name: str, has_tokens: bool) -> None:
    assert accepts(name, NAMED, output(name, one_call(name)), has_tokens=has_tokens)
    assert not accepts(name, NAMED, output(name, one_call(name, "{}", "get_time")), has_tokens=has_tokens)


@both
@each
def test_allowed_tools(name: str, has_tokens: bool) -> None:
    """Calls of other tools cannot be written, or in formats without a marker, they are text."""
    rome, other = output(name, one_call(name), one_call(name)), output(name, one_call(name, "{}", "get_time"))
    for use in (ALLOWED, ALLOWED_FORCED):
        assert accepts(name, use, rome, has_tokens=has_tokens)
        if not use.is_forced:
            assert accepts(name, use, text_before(name, "Hi."), has_tokens=has_tokens)
        if accepts(name, use, other, has_tokens=has_tokens):
            assert not use.is_forced
            assert calls(read(name, other, use)) == []


def text_before(name: str, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if name == "harmony" else text


@both
@each
@pytest.mark.parametrize("text", ["", "Hi.", 'if a > b { [x] } "q"', '{"name": "Ann"}'])
def test_auto_allows_text(name: str, has_tokens: bool, text: str) -> None:
    for use in (FREE, FREE_ONE):
        assert accepts(name, use, text_before(name, text), has_tokens=has_tokens)


@both
@each
def test_auto_allows_calls_after_text(name: str, has_tokens: bool) -> None:
    parts = [one_call(name), one_call(name, "{}", "get_time"), one_call(name)]
    if name == "harmony":
        parts.insert(0, text_before(name, "Hi."))
        text = output(name, *parts)
    else:
        text = "Hi. " + output(name, *parts)
    assert accepts(name, FREE, text, has_tokens=has_tokens)
    assert len(calls(read(name, text))) == 3
    assert not accepts(name, FREE_ONE, text, has_tokens=has_tokens)
    wrong = text + (output(name, "", one_call(name, "{}")) if name == "harmony" else " " + one_call(name, "{}"))
    assert not accepts(name, FREE, wrong, has_tokens=has_tokens)


@both
def test_the_list_of_mistral(has_tokens: bool) -> None:
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    for use in (FORCED, FREE):
        assert accepts("mistral", use, f"[TOOL_CALLS] [{call}, {call}]", has_tokens=has_tokens)
        assert not accepts(
            "mistral", use, f"[TOOL_CALLS] [{call}, {call.replace('city', 'town')}]", has_tokens=has_tokens
        )
    assert accepts("mistral", ONE, f"[TOOL_CALLS][{call}]", has_tokens=has_tokens)
    assert not accepts("mistral", ONE, f"[TOOL_CALLS][{call}, {call}]", has_tokens=has_tokens)
    assert accepts("mistral", NAMED, '[TOOL_CALLS]weather{"city": "Rome"}', has_tokens=has_tokens)


@both
def test_harmony_may_think_before_a_forced_call(has_tokens: bool) -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + output("harmony", one_call("harmony"))
    for use in (FORCED, ONE, NAMED, FREE, FREE_ONE):
        assert accepts("harmony", use, text, has_tokens=has_tokens)


def test_text_may_contain_other_tokens() -> None:
    """Added tokens are not text for llguidance; without these, a model could not think before its call."""
    text = "<think>Hm.</think>" + output("hermes", one_call("hermes"))
    assert accepts("hermes", FREE, text, has_tokens=True)
    assert accepts("llama3", FREE, "<|python_tag|>" + one_call("llama3"), has_tokens=True)


def test_a_marker_that_is_spelled_is_a_marker() -> None:
    made, grammars, tokens = followed(has_tokens=True)
    lark = FORMATS["hermes"].grammar(FREE, tokens)
    ids = [i for part in ("<tool_", "call>", "no call") for i in made.encode(part, add_special_tokens=False).ids]
    follower = matcher(grammars, json.dumps({"grammars": [{"lark_grammar": lark}]}))
    assert follower.try_consume_tokens(ids) == len("<tool_call>")


@each
def test_schemas_with_references(name: str) -> None:
    schema = {"properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"], "$defs": {"P": {"type": "integer"}}}
    use = ToolUse((Tool("weather", schema),), is_forced=True)
    assert accepts(name, use, output(name, one_call(name, '{"p": 1}')), has_tokens=True)
    assert not accepts(name, use, output(name, one_call(name, '{"p": "1"}')), has_tokens=True)


@each
@pytest.mark.parametrize("keyword", [{"not": {"type": "string"}}, {"type": "string", "pattern": "^(?!a)b$"}])
def test_a_keyword_that_cannot_be_enforced(name: str, keyword: dict[str, Any]) -> None:
    """It is an error of strict tools only."""
    schema = {"type": "object", "properties": {"a": keyword}}
    _, grammars, tokens = followed(has_tokens=True)
    for is_strict in (True, False):
        use = ToolUse((Tool("weather", schema, is_strict=is_strict),), is_forced=True)
        lark = FORMATS[name].grammar(use, tokens)
        error = matcher(grammars, json.dumps({"grammars": [{"lark_grammar": lark}]})).get_error()
        assert bool(error) == is_strict


@both
@each
@pytest.mark.parametrize("tool", [WEATHER, STRICT])
def test_calls_or_an_answer_that_keeps_to_a_schema(name: str, has_tokens: bool, tool: Tool) -> None:
    """Also an answer that begins like a call of a format without a marker."""
    use = ToolUse((tool, TIME), schema=PERSON)
    one = replace(use, allows_several=False)
    rome, time = one_call(name), one_call(name, "{}", "get_time")
    ann = text_before(name, '{"name": "Ann", "n": 5}')
    good = [
        rome,
        ann,
        *(text_before(name, text) for text in ('{"name":"weather","n":5}', '{\n  "name": "w",\n  "n": 5\n}')),
    ]
    for text in (output(name, each) for each in good):
        assert accepts(name, use, text, has_tokens=has_tokens)
        assert accepts(name, one, text, has_tokens=has_tokens)
    assert accepts(name, use, output(name, rome, time, rome), has_tokens=has_tokens)
    wrong = [text_before(name, text) for text in ("Hi.", '{"name": "Ann"}', '{"name": "Ann", "n": "x"}')]
    for text in ("", *wrong, output(name, ann, rome), output(name, rome, ann), one_call(name, '{"city": 5}')):
        assert not accepts(name, use, text, has_tokens=has_tokens)
    assert not accepts(name, one, output(name, rome, rome), has_tokens=has_tokens)


@both
@each
def test_an_answer_may_have_the_name_of_a_special_token(name: str, has_tokens: bool) -> None:
    """The scheduler's process asks llguidance not to choose tokens then: it would choose the special one."""
    made, grammars, tokens = followed(has_tokens=has_tokens)
    lark = FORMATS[name].grammar(ToolUse((WEATHER,), schema={"const": "<eos>"}), tokens)
    follower = matcher(grammars, checked_grammar(grammars, "lark", lark, ["<eos>"]))
    for token_id in made.encode(text_before(name, '"'), add_special_tokens=False).ids:
        assert follower.consume_token(token_id)
    mask = int.from_bytes(follower.compute_bitmask(), "little")
    assert mask >> made.token_to_id("<") & 1


def test_uses_that_need_a_grammar() -> None:
    assert [use.needs_grammar for use in (USE, FREE, FREE_ONE, FORCED)] == [False, True, True, True]
    assert [replace(USE, schema={}, is_read=each).needs_grammar for each in (True, False)] == [True, False]


@both
@each
@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_forced_grammar_allows_is_read_as_calls(name: str, has_tokens: bool, seed: int) -> None:
    """A random walk through the masks ends with calls of offered tools whose arguments keep to their schema."""
    drawn = random.Random(seed)
    cities = Tool("weather", {"properties": {"city": {"enum": ["Rome", 'a"}']}}, "required": ["city"]}, is_strict=True)
    use = ToolUse((cities, TIME), is_forced=True, allows_several=seed % 2 == 0)
    made, grammars, tokens = followed(has_tokens=has_tokens)
    lark = FORMATS[name].grammar(use, tokens)
    follower = matcher(grammars, json.dumps({"grammars": [{"lark_grammar": lark}]}))
    ids: list[int] = []
    eos = made.token_to_id("<eos>")
    while not follower.is_stopped() and (not ids or ids[-1] != eos):
        allowed = [i for i, bias in enumerate(follower.compute_logit_bias()) if bias]
        ids.append(eos if eos in allowed and drawn.random() < 0.7 else drawn.choice(allowed))
        assert follower.consume_token(ids[-1])
    text = made.decode([i for i in ids if i != eos], skip_special_tokens=False)
    found = calls(read(name, text, use))
    assert found, text
    for tool, arguments in found:
        city = json.loads(arguments).get("city")
        assert city in (("Rome", 'a"}') if tool == "weather" else (None,))
