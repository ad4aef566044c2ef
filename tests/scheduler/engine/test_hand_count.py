"""A scripted load, counted by hand: every counter, and count and sum of every histogram, must come to exactly that.

All of the scheduler is real but the executor, which answers when the test says so. The clock of the metrics shows how
many steps it has answered: a second is a step. The pool has 8 blocks of 4 tokens, a step takes at most 16 tokens and 4
sequences, one plan is out at a time, two requests may wait. A token's KV is written by the step after the one that
samples it, so a sequence of p prompt tokens and g generated ones computes p + g - 1.

Each act says what it adds; what it does not name, it must not change.
"""

import asyncio
import time

from tests.support.scheduler.scripted_engine import (
    NUM_BLOCKS,
    VOCABULARY,
    Counts,
    ScriptedEngine,
    ended,
    prompt_tokens,
    steps,
    times,
    total,
)


async def test_the_whole_play(scripted_engine: ScriptedEngine) -> None:
    assert scripted_engine.added() == {}
    for act in (
        one_request, a_prefix_hit, two_samples, a_preemption, a_client_leaves, a_client_leaves_the_queue, refusals,
        a_lost_executor, deadlines, beams, ends_by_a_token, given_up,
    ):  # fmt: skip
        expected = await act(scripted_engine)
        assert scripted_engine.added() == expected, act.__name__
        gauges = scripted_engine.gauges()
        assert not scripted_engine.client.held, act.__name__
        for name in ("requests_running", "queue_requests/new", "queue_prompt_tokens", "queue_oldest_age_seconds"):
            assert gauges[name] == 0, (act.__name__, name)
        assert gauges["kv_blocks/active"] == gauges["kv_occupancy_ratio"] == gauges["kv_waste_ratio"] == 0
        assert gauges["kv_blocks/free"] + gauges["kv_blocks/cached"] == NUM_BLOCKS, act.__name__


async def one_request(scripted_engine: ScriptedEngine) -> Counts:
    """9 prompt tokens, 3 generated: 9 computed by the first step, 1 by each of two more."""
    await scripted_engine.ask([1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    await scripted_engine.step(3)
    return total(
        steps(9, 1, 1),
        prompt_tokens(9),
        {"request_prompt_tokens_count": 1, "request_generation_tokens_count": 1, "request_generation_tokens_sum": 3},
        {"generation_tokens": 3, "requests_finished/length": 1},
        times("request_queue_time", 0),  # planned as soon as it came
        times("time_to_first_token", 1),  # with the first result
        times("request_prefill_time", 1),
        times("inter_token_latency", 1, 1),
        times("time_per_output_token", 1),  # the mean of these
        times("request_decode_time", 2),
        times("e2e_request_latency", 3),
    )


async def a_prefix_hit(scripted_engine: ScriptedEngine) -> Counts:
    """Of 10 prompt tokens, the first 8 are two blocks of the request before; the step computes the other 2."""
    await scripted_engine.ask([1, 2, 3, 4, 5, 6, 7, 8, 20, 21], 1)
    await scripted_engine.step()
    return total(
        steps(2),
        prompt_tokens(10, num_cached=8),
        {"request_prompt_tokens_count": 1, "request_generation_tokens_count": 1, "request_generation_tokens_sum": 1},
        {"generation_tokens": 1, "requests_finished/length": 1},
        times("request_queue_time", 0),
        times("time_to_first_token", 1),
        times("request_prefill_time", 1),
        times("request_decode_time", 0),  # its only token is its last: no gap, and no mean of gaps
        times("e2e_request_latency", 1),
    )


async def two_samples(scripted_engine: ScriptedEngine) -> Counts:
    """6 prompt tokens fill a block and half of another, computed once for both samples, which share both blocks. The
    second step writes the KV of their first tokens: the first to write copies the half block, the second then has it
    alone."""
    await scripted_engine.ask([30, 31, 32, 33, 34, 35], 2, sampling={"seed": 7, "n": 2})
    await scripted_engine.step(2)
    return total(
        steps(6, 2),
        prompt_tokens(6),
        {"kv_cow_copies": 1},
        {"request_prompt_tokens_count": 1, "request_generation_tokens_count": 1, "request_generation_tokens_sum": 4},
        {"generation_tokens": 4, "requests_finished/length": 1},
        times("request_queue_time", 0),
        times("time_to_first_token", 1),  # of the request: its second sample's first token is no other
        times("request_prefill_time", 1),
        times("inter_token_latency", 1, 1),  # one gap each
        times("time_per_output_token", 1, 1),
        times("request_decode_time", 1),
        times("e2e_request_latency", 2),
    )


async def a_preemption(scripted_engine: ScriptedEngine) -> Counts:
    """Two requests of 12 + 8 tokens want 5 blocks each, and there are 8.

    step        1   2  3  4  5  6  7  8  9  10 11 12
    A computes  12  1  1  1  1  1  1  1                   its 8 tokens are there after step 8
    B computes  4   8  1  1  1              4  1  1  1    its 8 tokens: after steps 2 3 4 5 and 9 10 11 12

    Before step 6 both have filled 4 blocks, or will with their next token, and A needs a fifth: B, the later one, gives
    up 15 computed tokens (of its 16 the last one is not computed). A takes one of B's blocks; the 3 left hold 12
    tokens of B's prompt, but B needs 4 blocks to run again. When A has ended, B finds these 12 tokens and recomputes 4.
    None of that is a hit, and nothing is generated twice.
    """
    await scripted_engine.ask([40, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 8)
    await scripted_engine.ask([41, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 8)
    await scripted_engine.step(5)
    assert scripted_engine.gauges()["queue_requests/preempted"] == 1
    await scripted_engine.step(7)
    return total(
        steps(16, 9, 2, 2, 2, 1, 1, 1, 4, 1, 1, 1),
        prompt_tokens(12 + 12),
        {"preemptions/recompute": 1, "preempted_tokens": 15},
        {"request_prompt_tokens_count": 2, "request_generation_tokens_count": 2, "request_generation_tokens_sum": 16},
        {"generation_tokens": 16, "requests_finished/length": 2},
        times("request_queue_time", 0, 0),
        times("time_to_first_token", 1, 2),
        times("request_prefill_time", 1, 2),
        times("inter_token_latency", 1, 1, 1, 1, 1, 1, 1, *(1, 1, 1, 4, 1, 1, 1)),  # B's pause: steps 6 7 8 and 9
        times("time_per_output_token", 7 / 7, 10 / 7),
        times("request_decode_time", 7, 10),
        times("e2e_request_latency", 8, 12),
    )


async def a_client_leaves(scripted_engine: ScriptedEngine) -> Counts:
    """After 2 of 20 tokens. The third step is on its way by then: it is a step, and its token is nobody's."""
    client = await scripted_engine.ask([42, 2, 2, 2, 2], 20)
    await scripted_engine.step(2)
    await scripted_engine.leave(client)
    await scripted_engine.step()
    return total(
        steps(5, 1, 1),
        prompt_tokens(5),
        {"request_prompt_tokens_count": 1, "request_generation_tokens_count": 1, "request_generation_tokens_sum": 2},
        {"generation_tokens": 2, "requests_finished/cancelled": 1},
        times("request_queue_time", 0),
        times("time_to_first_token", 1),
        times("request_prefill_time", 1),
        times("inter_token_latency", 1),
        times("request_decode_time", 1),  # no mean of gaps: the sequence has no result
        times("e2e_request_latency", 2),
    )


async def a_client_leaves_the_queue(scripted_engine: ScriptedEngine) -> Counts:
    """Four sequences fill the batch; who comes now waits, and leaves. The four have a token each, and end together."""
    client = await scripted_engine.ask([43, 3, 3, 3, 3], 1, sampling={"seed": 1, "n": 4})
    await scripted_engine.quiet()
    waiting = await scripted_engine.ask([44, 3, 3, 3, 3], 1)
    await scripted_engine.quiet()
    assert scripted_engine.gauges()["queue_requests/new"] == 1
    assert scripted_engine.gauges()["queue_prompt_tokens"] == 5
    await scripted_engine.leave(waiting)
    await scripted_engine.step()
    assert len(client.token_ids) == 4
    return total(
        steps(5),
        prompt_tokens(5),  # the other one's prompt was never looked up
        {"request_prompt_tokens_count": 1, "request_generation_tokens_count": 2, "request_generation_tokens_sum": 4},
        {"generation_tokens": 4, "requests_finished/length": 1, "requests_finished/cancelled": 1},
        times("request_queue_time", 0),
        times("time_to_first_token", 1),
        times("request_prefill_time", 1),
        times("request_decode_time", 0),
        times("e2e_request_latency", 1, 0),
    )


async def refusals(scripted_engine: ScriptedEngine) -> Counts:
    """A temperature that is none; 34 tokens where 33 fit (8 blocks, and a last token without KV); and with 1 request in
    the batch and 2 in the queue, one more. What is refused is in no other number."""
    assert (await ended(await scripted_engine.ask([1], 1, sampling={"temperature": -1.0}))).messages == []
    await ended(await scripted_engine.ask([45] * 30, 4))
    clients = []
    for number in range(3):
        clients.append(await scripted_engine.ask([45 + number, 4, 4], 1, sampling={"seed": 1, "n": 4}))
        await scripted_engine.quiet()
    await ended(await scripted_engine.ask([49, 4, 4], 1))
    await scripted_engine.step(3)
    assert [len(client.token_ids) for client in clients] == [4, 4, 4]
    return total(
        {f"requests_rejected/{code}": 1 for code in ("invalid_argument", "out_of_range", "resource_exhausted")},
        # Three requests of 4 samples, one after the other, each of one token.
        steps(3, 3, 3),
        prompt_tokens(9),
        {"request_prompt_tokens_count": 3, "request_generation_tokens_count": 3, "request_generation_tokens_sum": 12},
        {"generation_tokens": 12, "requests_finished/length": 3},
        times("request_queue_time", 0, 1, 2),
        times("time_to_first_token", 1, 2, 3),
        times("request_prefill_time", 1, 1, 1),
        times("request_decode_time", 0, 0, 0),
        times("e2e_request_latency", 1, 2, 3),
    )


async def a_lost_executor(scripted_engine: ScriptedEngine) -> Counts:
    """Two samples of 6 + 4 tokens, lost when each has 2, and a third step is on its way.

    step      1  2  3 | 4  5  6
    sample 0  6  1  1 | 8  1        tokens after steps 1 2 and 4 5
    sample 1     1  1 |    4  1     tokens after steps 1 2 and 5 6

    Then 8 tokens each are to be computed again. Sample 1 begins with the same block as sample 0 does, and waits for
    that: it finds 4 tokens after step 4, and computes 4. Copied on write was one block, as before.
    """
    client = await scripted_engine.ask([10, 11, 12, 13, 14, 15], 4, sampling={"seed": 7, "n": 2})
    await scripted_engine.step(2)
    before = client.token_ids
    assert before[0] != before[1], "or they would share their second block as well"
    scripted_engine.client.is_up = False
    scripted_engine.client.lose()
    await scripted_engine.quiet()
    gauges = scripted_engine.gauges()
    assert (gauges["queue_requests/executor_lost"], gauges["queue_requests/preempted"]) == (1, 0)
    assert (gauges["requests_running"], gauges["queue_prompt_tokens"], gauges["ready"]) == (0, 2 * 6, 0)
    scripted_engine.client.is_up = True
    while not scripted_engine.client.held:  # noqa: ASYNC110  (the engine pauses before it tries again)
        await asyncio.sleep(0.01)
    assert scripted_engine.gauges()["ready"] == 1
    await scripted_engine.step(3)
    return total(
        steps(6, 2, 2, 8, 5, 1),
        prompt_tokens(6),
        {"kv_cow_copies": 1},
        {"request_prompt_tokens_count": 1, "request_generation_tokens_count": 1, "request_generation_tokens_sum": 8},
        {"generation_tokens": 8, "requests_finished/length": 1},
        times("request_queue_time", 0),
        times("time_to_first_token", 1),
        times("request_prefill_time", 1),
        # The third step was never answered: step 4 is the clock's third second.
        times("inter_token_latency", *(1, 1, 1), *(1, 2, 1)),
        times("time_per_output_token", 3 / 3, 4 / 3),
        times("request_decode_time", 4),
        times("e2e_request_latency", 5),
    )


async def deadlines(scripted_engine: ScriptedEngine) -> Counts:
    """One that passes in the queue, and one after the first token, with a second step on its way."""
    queued = await ended(await scripted_engine.ask([16, 5, 5, 5, 5], 1, deadline_s=time.monotonic() - 1))
    assert queued.messages == []
    running = await scripted_engine.ask([17, 5, 5, 5, 5], 20, deadline_s=time.monotonic() + 1.0)
    await scripted_engine.step()
    assert len(running.token_ids[0]) == 1, "the machine was too slow for this test"
    await ended(running)
    await scripted_engine.step()
    return total(
        steps(5, 1),
        prompt_tokens(5),
        {"request_prompt_tokens_count": 1, "request_generation_tokens_count": 2, "request_generation_tokens_sum": 1},
        {"generation_tokens": 1, "requests_finished/deadline": 2},
        times("request_queue_time", 0),
        times("time_to_first_token", 1),
        times("request_prefill_time", 1),
        times("request_decode_time", 0),
        times("e2e_request_latency", 0, 1),
    )


async def beams(scripted_engine: ScriptedEngine) -> Counts:
    """Two beams of 2 tokens, the better one returned. Its tokens count, and not those of beams that came to nothing.

    The first step computes the 6 prompt tokens, the second a row for each beam; both write into the half block that
    they share, so one of them copies it. All tokens come at once, with the end: they have no gaps, and no mean of gaps.
    """
    client = await scripted_engine.ask([18, 6, 6, 6, 6, 6], 2, sampling={"beam_width": 2})
    await scripted_engine.step(2)
    assert [len(token_ids) for token_ids in client.token_ids.values()] == [2]
    return total(
        steps(6, 2),
        prompt_tokens(6),
        {"kv_cow_copies": 1},
        {"request_prompt_tokens_count": 1, "request_generation_tokens_count": 1, "request_generation_tokens_sum": 2},
        {"generation_tokens": 2, "requests_finished/length": 1},
        times("request_queue_time", 0),
        times("time_to_first_token", 2),
        times("request_prefill_time", 2),
        times("request_decode_time", 0),
        times("e2e_request_latency", 2),
    )


async def ends_by_a_token(scripted_engine: ScriptedEngine) -> Counts:
    """Every token is an EOS here, unless ignored; and every token is a stop id, if the client says so."""
    await scripted_engine.ask([19, 7, 7, 7, 7], 9, stopping={})
    await scripted_engine.step()
    await scripted_engine.ask([20, 7, 7, 7, 7], 9, stopping={"ignore_eos": True, "stop_token_ids": list(VOCABULARY)})
    await scripted_engine.step()
    return total(
        steps(5, 5),
        prompt_tokens(10),
        {"request_prompt_tokens_count": 2, "request_generation_tokens_count": 2, "request_generation_tokens_sum": 2},
        {"generation_tokens": 2, "requests_finished/eos": 1, "requests_finished/stop": 1},
        times("request_queue_time", 0, 0),
        times("time_to_first_token", 1, 1),
        times("request_prefill_time", 1, 1),
        times("request_decode_time", 0, 0),
        times("e2e_request_latency", 1, 1),
    )


async def given_up(scripted_engine: ScriptedEngine) -> Counts:
    """Executor after executor dies under its first step: 5 in a row are borne, the sixth is its end.

    It was admitted, and never had a result: its prompt counts nowhere.
    """
    client = await scripted_engine.ask([21, 8, 8, 8, 8], 9)
    await scripted_engine.quiet()
    for _ in range(6):
        assert scripted_engine.client.held
        await scripted_engine.lose_executor()
    await ended(client)
    return total(
        steps(5, 5, 5, 5, 5, 5),
        {"request_generation_tokens_count": 1, "requests_finished/error": 1},
        times("request_queue_time", 0),
        times("e2e_request_latency", 0),
    )
