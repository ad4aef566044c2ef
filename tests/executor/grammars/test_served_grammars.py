"""Grammars over the plan stream: the feature, the wire, and the kinds of structured output with the embedded model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from executor.loading import load_model
from executor.plans.plan import Admission, EndReason, SequenceParams, StepPlan
from executor.server import Server
from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1.executor_pb2_grpc import ExecutorStub
from quire.grammars import FEATURE
from tests.support.executor.letters import EOS
from tests.support.executor.messages import plan_message, read
from tests.support.executor.plan_driver import PlanDriver, ints, tuples
from tests.support.executor.served import CONFIG, open_stream, opening, status

TINY = Path("models/tiny")
TINY_EOS = 2


def served(directory: Path) -> Server:
    config = replace(CONFIG, model=str(directory), kernels="reference", device="cpu", block_size=4, num_blocks=40)
    return Server(config, load_model(config, lambda line: None))


async def test_grammars_are_followed_over_grpc(lettered) -> None:
    server = served(lettered.directory)
    grammar = LLMatcher.grammar_from_regex("abc")
    params = SequenceParams(max_total_tokens=20, grammar=grammar, num_prompt_tokens=5, eos_token_ids=ints(EOS))
    wrong = replace(params, grammar="x")
    admissions = tuple(
        Admission(slot, ints(*lettered.prompt(5)), 0, ints(1 + 4 * slot, 2 + 4 * slot, 3 + 4 * slot), each)
        for slot, each in enumerate((params, wrong))
    )
    first = StepPlan(1, 1, admissions=admissions, row_counts=tuples(2, (0, 5), (1, 5)))
    second = StepPlan(1, 2, retired_slots=ints(1), row_counts=tuples(2, (0, 1)))
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        stub = ExecutorStub(channel)
        assert FEATURE in (await stub.Describe(pb.DescribeRequest())).features
        call, _ = await open_stream(stub, features=(FEATURE,))
        results = []
        for plan in (first, second, StepPlan(1, 3), StepPlan(1, 4)):
            await call.write(pb.RunRequest(plan=plan_message(plan)))
            results.append(await read(call))
            if EndReason.EOS in results[-1].end_reasons:
                break
        call.cancel()
    assert results[0].end_reasons == bytes([EndReason.GOES_ON, pb.END_REASON_GRAMMAR])
    assert np.frombuffer(results[-1].token_ids, "<i4").tolist() == [EOS]
    assert "quire_executor_grammars_compiled_total" in exported(server)
    assert exported(server)["quire_executor_grammars_compiled_total"] == 2
    assert exported(server)["quire_executor_grammar_ends_total"] == 1
    await server.stop()


def exported(server: Server) -> dict[str, float]:
    return {sample.name: sample.value for family in server.metrics.collect() for sample in family.samples}


async def test_an_executor_without_a_tokenizer_has_no_grammars(checkpoint) -> None:
    server = served(checkpoint("llama").directory)
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        stub = ExecutorStub(channel)
        assert FEATURE not in (await stub.Describe(pb.DescribeRequest())).features
        call = stub.Run()
        await call.write(opening(features=(FEATURE,)))
        code, details = await status(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "lacks features that the scheduler needs: grammars" in details
    await server.stop()


def test_without_a_tokenizer_a_grammar_ends_its_sequence_only(checkpoint, make_runner) -> None:
    source = checkpoint("llama")
    driver = PlanDriver(make_runner(source.directory))
    wrong = driver.admit(source.prompt(4), 9, grammar=LLMatcher.grammar_from_regex("a"), eos_token_ids=ints(3))
    plain = driver.admit(source.prompt(5), 9)
    driver.run()
    assert wrong.reason is EndReason.GRAMMAR
    assert plain.output == source.greedy(source.prompt(5), 9)


PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Nora", "Finn"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LARK = 'start: "say " WORD ("," WORD)*\nWORD: /[a-z]{1,4}/\n'
KINDS = {
    "json schema": (
        LLMatcher.grammar_from_json_schema(json.dumps(PERSON)),
        lambda text: json.loads(text)["name"] in ("Nora", "Finn") and 0 <= json.loads(text)["age"] <= 99,
    ),
    "json object": (
        LLMatcher.grammar_from_json_schema('{"type":"object","maxProperties":1,"x-guidance":{"whitespace_flexible":false},'
                                           '"additionalProperties":{"type":"integer","maximum":9,"minimum":0}}'),
        lambda text: isinstance(json.loads(text), dict),
    ),
    "regex": (LLMatcher.grammar_from_regex("[0-9]{3}-[a-f]{2}"), re.compile("[0-9]{3}-[a-f]{2}").fullmatch),
    "choice": (LLMatcher.grammar_from_lark('start: "yes" | "no" | "not now"'), {"yes", "no", "not now"}.__contains__),
    "lark": (LLMatcher.grammar_from_lark(LARK), re.compile("say [a-z]{1,4}(,[a-z]{1,4})*").match),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(make_runner):
    return make_runner(TINY, num_blocks=400)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_structured_output_gives_such_a_text(kind, tiny) -> None:
    grammar, is_right = KINDS[kind]
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    prompt = tokenizer.encode("Once upon a time there was a fox named").ids
    driver = PlanDriver(tiny)
    params = {"grammar": grammar, "eos_token_ids": ints(TINY_EOS)}
    sequences = [driver.admit(prompt, 60, **params)]
    sequences += [driver.admit(prompt, 60, temperature=1.0, seed=seed, **params) for seed in range(3)]
    driver.run()
    for sequence in sequences:
        text = tokenizer.decode(sequence.output)
        assert sequence.reason is EndReason.EOS or kind == "lark", text
        assert is_right(text), text
