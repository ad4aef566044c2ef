"""Grammars are compiled as the executor will follow them; those that cannot be used are refused by name."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer as FastTokenizer

from quire.grammars import grammar_tokenizer, matcher
from scheduler.text.grammars import (
    CompiledGrammar,
    GrammarCache,
    GrammarCompiler,
    GrammarDefinition,
)
from tests.support.scheduler.grammar_rig import MakeCompiler, compile_text
from tests.support.waiting import until


@pytest.fixture(scope="module")
def vocabulary(byte_level: FastTokenizer, tokenizer_json: str) -> LLTokenizer:
    return grammar_tokenizer(tokenizer_json, byte_level.get_vocab_size(), [byte_level.token_to_id("</s>")])


def matches(vocabulary: LLTokenizer, grammar: str, text: str) -> bool:
    """Returns whether the text is complete in the grammar."""
    followed = matcher(vocabulary, grammar)
    assert not followed.get_error()
    tokens = vocabulary.tokenize_str(text)
    return followed.try_consume_tokens(tokens) == len(tokens) and followed.is_accepting()


ODD = ["del\x7f", "yes", "", 'say "no"\\', "line\nbreak\t\x00", "a/b", "🦊é", "yes and no", "%json", "{}", "<|end|>"]


@pytest.mark.parametrize(
    ("kind", "text", "accepted", "refused"),
    [
        ("regex", "[a-c]+/\n?", ["ab/", "c/\n"], ["ab", "", "d/", "ab/ "]),
        ("regex", "(a+)+b", ["aaab"], ["aaa", "aaabb"]),
        ("lark", 'start: "a" x\nx: /[0-9]/ | start', ["a1", "aa2"], ["a", "aa"]),
        ("json_schema", '{"type": "object"}', ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{", "", "{} "]),
        ("json_schema", '{"enum": [5, "x"]}', ["5", '"x"'], ["6", "x"]),
        ("choice", json.dumps(ODD), ODD, ["ye", "yes and ", "%", "a"]),
        ("choice", '["only"]', ["only"], ["onl", "only "]),
    ],
)
async def test_each_kind_accepts_its_texts(
    make_compiler: MakeCompiler, vocabulary: LLTokenizer, kind: str, text: str, accepted: list[str], refused: list[str]
) -> None:
    compiled = await compile_text(make_compiler(), kind, text)
    assert compiled.problem == ""
    assert {each: matches(vocabulary, compiled.text, each) for each in accepted} == dict.fromkeys(accepted, True)
    assert {each: matches(vocabulary, compiled.text, each) for each in refused} == dict.fromkeys(refused, False)


@pytest.mark.parametrize(
    ("draft", "accepted", "refused"),
    [
        ("http://json-schema.org/draft-07/schema#", ['{"a": 5}', '{"a": 2}'], ['{"a": "x"}']),
        ("https://json-schema.org/draft/2020-12/schema", ['{"a": 2}'], ['{"a": 5}', '{"a": "x"}']),
    ],
)
async def test_what_stands_beside_a_reference_holds_by_the_draft(
    make_compiler: MakeCompiler, vocabulary: LLTokenizer, draft: str, accepted: list[str], refused: list[str]
) -> None:
    schema = {
        "$schema": draft,
        "properties": {"a": {"$ref": "#/definitions/number", "maximum": 3}},
        "definitions": {"number": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = (await compile_text(make_compiler(), "json_schema", json.dumps(schema))).text
    assert all(matches(vocabulary, grammar, each) for each in accepted)
    assert not any(matches(vocabulary, grammar, each) for each in refused)


async def test_schemas_of_pydantic_and_zod(make_compiler: MakeCompiler, vocabulary: LLTokenizer) -> None:
    """They have keywords that restrict nothing, and tags with a default, which are not required."""
    tagged = {
        each: {"type": "object", "properties": {"kind": {"const": each, "default": each}, each: {"type": "integer"}}}
        for each in ("cat", "dog")
    }
    schema = {
        "type": "object",
        "properties": {
            "pet": {
                "discriminator": {"propertyName": "kind"},
                "oneOf": [{"$ref": f"#/$defs/{each}"} for each in tagged],
            },
            "ages": {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "integer"},
            },
            "key": {"type": "string", "format": "password", "writeOnly": True},
        },
        "required": ["pet", "ages", "key"],
        "$defs": {each: value | {"additionalProperties": False} for each, value in tagged.items()},
    }
    compiled = await compile_text(make_compiler(), "json_schema", json.dumps(schema))
    assert compiled.problem == ""
    good = {"pet": {"kind": "dog", "dog": 5}, "ages": {"a": 5}, "key": "k"}
    assert matches(vocabulary, compiled.text, json.dumps(good))
    for bad in ({"pet": {"kind": "dog", "cat": 5}}, {"pet": {}}, {"ages": {"a": "x"}}, {"key": 5}):
        assert not matches(vocabulary, compiled.text, json.dumps(good | bad))


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "a\x1bb"},
        {"items": {"enum": ["x", {"y": ["a\x7f"]}]}},
        {"properties": {"const": {"pattern": "^a\\x1bb$"}}},
        {"patternProperties": {"^a\x00b$": {}}},
    ],
)
async def test_texts_that_strings_cannot_have_are_refused(make_compiler: MakeCompiler, schema: dict[str, Any]) -> None:
    compiled = await compile_text(make_compiler(), "json_schema", json.dumps(schema))
    assert compiled.problem == "const, enum and pattern can have no control character but \\b, \\f, \\n, \\r and \\t"


async def test_control_characters_that_can_be_written_or_are_data_are_accepted(
    make_compiler: MakeCompiler, vocabulary: LLTokenizer
) -> None:
    schema = {
        "description": "\x1b",
        "properties": {"\x1b": {"const": "\t\n"}, "enum": {"pattern": r"^[^\x00-\x1f\x7f]\\x1b$"}},
        "required": ["\x1b", "enum"],
    }
    grammar = (await compile_text(make_compiler(), "json_schema", json.dumps(schema))).text
    assert matches(vocabulary, grammar, json.dumps({"\x1b": "\t\n", "enum": r"a\x1b"}))


@pytest.mark.parametrize(
    ("kind", "text", "output"),
    [
        ("choice", '["a<|user|>b"]', "a<|user|>b"),
        ("choice", '["</s>"]', "</s>"),
        ("regex", r"<\|user\|>/", "<|user|>/"),
        ("json_schema", r'{"const": "\u003c|user|>"}', '"<|user|>"'),
        ("lark", 'start: "<|user|>"', "<|user|>"),
    ],
)
async def test_texts_may_have_the_names_of_special_tokens(
    make_compiler: MakeCompiler, vocabulary: LLTokenizer, kind: str, text: str, output: str
) -> None:
    followed = matcher(vocabulary, (await compile_text(make_compiler(), kind, text)).text)
    written = b""
    while not followed.is_accepting():
        mask = int.from_bytes(followed.compute_bitmask(), "little")
        allowed = [i for i in range(vocabulary.vocab_size) if mask >> i & 1 and not vocabulary.is_special_token(i)]
        assert allowed
        followed.consume_token(allowed[0])
        assert not followed.get_error()
        written += vocabulary.decode_bytes(allowed[:1])
    assert written.decode() == output


async def test_white_space_in_json_is_bounded(make_compiler: MakeCompiler, vocabulary: LLTokenizer) -> None:
    value: Any = {"name": "x  y", "empty": {}, "list": [1, [], [[2]]]}
    for _ in range(4):
        value = {"inner": value, "other": None}
    schema = json.dumps({"type": "object", "x-guidance": {"whitespace_pattern": "[ \n]*"}})
    grammar = (await compile_text(make_compiler(), "json_schema", schema)).text
    for indent in (None, 1, 2, 4, "\t"):
        assert matches(vocabulary, grammar, json.dumps(value, indent=indent)), indent
    assert matches(vocabulary, grammar, json.dumps(value, separators=(",", ":")))
    for text in ('{  "a": 1}', '{"a":  1}', '{\n\n"a": 1}', '{"a": 1 \n}', '{"a"\t: 1}', f'{{\n{" " * 65}"a": 1}}'):
        assert not matches(vocabulary, grammar, text), text


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json_schema", "{", "line 1 column 1"),
        ("json_schema", "[]", "must be a JSON schema that is an object"),
        ("json_schema", "true", "must be a JSON schema that is an object"),
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", '{"not": {"type": "object"}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"$ref": "#/$defs/absent"}', "'/$defs/absent' does not exist"),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "does not fetch"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "does not fetch"),
        ("json_schema", '{"allOf": [{"$ref": "#"}]}', "no text fits it"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum (5) is greater"),
        ("json_schema", '{"type":"array","items":' * 5000 + "{}" + "}" * 5000, "recursion limit"),
        ("json_schema", "[" * 100_000, "recursion limit"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "(" * 5000 + ")" * 5000, "invalid regex"),
        ("lark", "start: absent", 'unknown name: "absent"'),
        ("lark", 'begin: "a"', "no start rule"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        ("lark", '{"grammars": []}', "1(1)"),
        ("lark", "start: X\nX: /(a|b)*a(a|b){20}/ & ~(/(a|b)*a(a|b){20}/)", "fuel exhausted"),
        ("regex", "a" * 300_000, "more than 262144"),
    ],
)
async def test_grammars_that_cannot_be_used_are_refused_by_name(
    make_compiler: MakeCompiler, kind: str, text: str, problem: str
) -> None:
    compiled = await compile_text(make_compiler(), kind, text)
    assert problem in compiled.problem
    assert (compiled.text, compiled.limit, len(compiled.problem) < 600) == ("", "", True)


async def test_equal_grammars_are_compiled_once_by_tenant(
    make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make_compiler()
    asked: list[str] = []
    ask = compiler._workers.ask

    async def count(message: dict[str, Any], tenant: str, size: int) -> Any:
        asked.append(tenant)
        return await ask(message, tenant, size)

    monkeypatch.setattr(compiler._workers, "ask", count)
    results = await asyncio.gather(*(compile_text(compiler, "regex", "a", tenant) for tenant in "aaaabb"))
    assert len({result.text for result in results}) == 1
    known = await compiler.compile(GrammarDefinition("regex", "a"), 400, "a")
    assert known.seconds is None
    assert known.grammar.text is (await compile_text(compiler, "regex", "a")).text
    assert (await compile_text(compiler, "regex", "(")).problem == (await compile_text(compiler, "regex", "(")).problem
    assert asked == ["a", "b", "a"]


def test_the_cache_keeps_what_was_used_last() -> None:
    size = CompiledGrammar("x" * 400).num_bytes
    cache = GrammarCache(5 * size)
    for i in range(5):
        cache.put(bytes([i]), CompiledGrammar(f"{i}" * 400))
    assert (len(cache), cache.num_bytes) == (5, 5 * size)
    assert cache.get(b"\0") is not None
    cache.put(b"\5", CompiledGrammar("5" * 400))
    assert (cache.get(b"\0") is None, cache.get(b"\1") is None, len(cache)) == (False, True, 5)
    cache.put(b"large", CompiledGrammar("x" * 6000))
    assert (len(cache), cache.num_bytes) == (0, 0)


async def test_cancelled_callers_do_not_affect_others(make_compiler: MakeCompiler) -> None:
    compiler = make_compiler()
    for i in range(10):
        first = asyncio.create_task(compile_text(compiler, "regex", f"a{i}"))
        second = asyncio.create_task(compile_text(compiler, "regex", f"a{i}"))
        for _ in range(i):
            await asyncio.sleep(0)
        first.cancel()
        assert (await second).text
    await until(lambda: not compiler._running)


async def test_a_tokenizer_that_cannot_be_read_refuses_all_grammars(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path / "absent.json", [2])
    assert "cannot be followed with this model's tokenizer" in (await compile_text(compiler, "regex", "a")).problem
    await compiler.close()
