"""Grammars travel with admissions only, and their failures end one request."""

import asyncio
import math
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from quire.plan_stream import FEATURES
from scheduler.core import BeamParams, FinishReason, Request, SequenceParams, StepResult, check_invariants
from scheduler.engine.engine import Engine, ServerState
from tests.support.scheduler.engine_rig import RecordingSink, running_engine, submit
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient
from tests.support.waiting import until

GRAMMAR = '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'
ABLE = replace(DESCRIPTION, features=(*FEATURES, "grammars"))


def submit_with_grammar(engine: Engine, prompt: list[int], max_tokens: int, **fields: object) -> RecordingSink:
    params = SequenceParams(max_total_tokens=len(prompt) + max_tokens, grammar=GRAMMAR)
    request = Request(engine.new_request_id(), prompt, params, **fields)  # type: ignore[arg-type]
    sink = RecordingSink(request)
    engine.submit(request, sink)
    return sink


def grammars_sent(client: FakeClient) -> list[str]:
    assert client.stream is not None
    return [admission.params.grammar for plan in client.stream.plans for admission in plan.admissions]


async def test_a_grammar_is_sent_with_the_admission_and_again_to_a_new_executor() -> None:
    client = FakeClient(ABLE)
    async with running_engine(client) as engine:
        sink = submit_with_grammar(engine, [1, 2, 3], 60, seeds=(1, 2, 3))
        other = submit(engine, [4, 5], 60)
        await sink.first_token.wait()
        assert sorted(grammars_sent(client)) == ["", GRAMMAR]  # forks take it from their parent
        client.lose()
        await until(lambda: client.num_streams == 2)
        await sink.check()
        await other.check()
        assert sorted(grammars_sent(client)) == ["", GRAMMAR, GRAMMAR, GRAMMAR]


async def test_a_preempted_sequence_is_admitted_with_its_grammar() -> None:
    client = FakeClient(replace(ABLE, num_blocks=14))
    async with running_engine(client) as engine:
        sinks = [submit_with_grammar(engine, [i, 2, 3], 30) for i in range(4)]
        for sink in sinks:
            await sink.check()
        assert engine.core is not None
        assert engine.core.state.counters.num_preemptions > 0
        assert len(grammars_sent(client)) == 4 + engine.core.state.counters.num_preemptions
        assert set(grammars_sent(client)) == {GRAMMAR}


async def test_a_grammar_that_cannot_be_followed_fails_its_request_and_no_other() -> None:
    client, num_steps = FakeClient(ABLE), 0

    def alter(result: StepResult) -> StepResult:
        nonlocal num_steps
        num_steps += 1
        if num_steps != 4:
            return result
        reasons: list[FinishReason | None] = [FinishReason.GRAMMAR, *[None] * (len(result.token_ids) - 1)]
        return replace(result, end_reasons=reasons)

    client.alter = alter
    async with running_engine(client) as engine:
        failing = submit_with_grammar(engine, [1, 2, 3], 150, seeds=(1, 2))
        others = [submit(engine, [i, 5], 20) for i in range(3)]
        await asyncio.wait_for(failing.done.wait(), 10)
        assert failing.reasons == {0: FinishReason.GRAMMAR}
        for other in others:
            await other.check()
        await until(lambda: engine.core is not None and not engine.core.num_unfinished_requests)
        assert engine.failures.num_failures == 0
        assert client.num_streams == 1


async def test_a_sequence_whose_mask_is_late_is_admitted_again_and_loses_no_token() -> None:
    client, num_steps = FakeClient(ABLE), 0

    def alter(result: StepResult) -> StepResult:
        nonlocal num_steps
        num_steps += 1
        return replace(result, deferred=[0]) if num_steps in (1, 6, 7, 12) and result.token_ids else result

    client.alter = alter
    async with running_engine(client) as engine:
        sinks = [submit_with_grammar(engine, [i, 2, 3], 40, seeds=(1, 2)) for i in range(3)]
        for sink in sinks:
            await sink.check()
        assert engine.core is not None
        num_deferrals = engine.core.state.counters.num_deferrals
        assert num_deferrals >= 3
        assert len(grammars_sent(client)) == 3 + num_deferrals
        assert client.num_streams == 1


@pytest.mark.parametrize("step", [1, 3])
async def test_a_beam_whose_grammar_cannot_be_followed_fails_its_search_and_no_other_request(step: int) -> None:
    """No token of it is possible. It may be the first beam, or one of several."""
    client = FakeClient(ABLE)
    client.alter = impossible_at(step)
    async with running_engine(client) as engine:
        failing = submit_with_grammar(engine, [1, 2, 3], 30, beam=BeamParams(4, 2))
        others = [submit(engine, [i, 5], 20) for i in range(3)]
        await asyncio.wait_for(failing.done.wait(), 10)
        assert (failing.reasons, failing.outputs) == ({0: FinishReason.GRAMMAR}, {})
        for other in others:
            await other.check()
        await until(lambda: engine.core is not None and not engine.core.num_unfinished_requests)
        assert engine.core is not None
        pool = engine.core.state.cache.pool
        check_invariants(engine.core)
        await until(lambda: pool.num_free_blocks == pool.num_usable_blocks)
        assert engine.failures.num_failures == 0
        assert client.num_streams == 1


async def test_without_a_grammar_a_search_without_tokens_has_an_empty_result() -> None:
    client = FakeClient(ABLE)
    client.alter = impossible_at(1)
    async with running_engine(client) as engine:
        sink = submit(engine, [1, 2, 3], 30, beam=BeamParams(4, 2))
        await asyncio.wait_for(sink.done.wait(), 10)
        assert sink.reasons == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH}
        assert sink.scores == {0: -math.inf, 1: -math.inf}


def impossible_at(step: int) -> Callable[[StepResult], StepResult]:
    """Returns a function that forbids all candidates of the last beam in one of the steps that report candidates."""
    num_steps = 0

    def alter(result: StepResult) -> StepResult:
        nonlocal num_steps
        num_steps += result.candidates is not None
        if num_steps != step or result.candidates is None:
            return result
        values = array("f", result.candidates.values)
        values[-8:] = array("f", [-math.inf] * 8)
        return replace(result, candidates=replace(result.candidates, values=values))

    return alter


@pytest.mark.parametrize("is_able", [True, False])
async def test_requests_with_grammars_fail_if_the_next_executor_cannot_follow_them(is_able: bool) -> None:
    client = FakeClient(ABLE)
    async with running_engine(client) as engine:
        assert engine.description.has_grammars
        with_grammar, other = submit_with_grammar(engine, [1, 2, 3], 100), submit(engine, [4, 5], 100)
        await with_grammar.first_token.wait()
        client.description = ABLE if is_able else DESCRIPTION
        client.lose()
        await until(lambda: client.num_streams == 2 and engine.state is ServerState.SERVING)
        await other.check()
        assert engine.description.has_grammars is is_able
        if is_able:
            await with_grammar.check()
        else:
            assert with_grammar.reasons == {0: FinishReason.ERROR}
            assert grammars_sent(client) == [""]
