"""Compares every counter, and the count and sum of every histogram, with numbers counted by hand for scripted loads.

The whole scheduler is real except the executor, which answers when the test tells it to. The clock of the metrics
counts the steps that it has answered: a second is a step. The pool has 8 blocks of 4 tokens, a step takes at most 16
tokens and 4 sequences, one plan is in flight at a time, and two requests may wait. A token's KV is written by the step
after the one that samples it, so a sequence of p prompt tokens and g generated ones computes p + g - 1.

Each load returns what it adds. It must not change anything else.
"""

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
from tests.support.waiting import until


async def test_metrics_equal_the_numbers_counted_by_hand(scripted_engine: ScriptedEngine) -> None:
    assert scripted_engine.added() == {}
    for load in (
        one_request, a_prefix_hit, two_samples, a_preemption, a_client_leaves, a_client_leaves_the_queue, refusals,
        a_lost_executor, deadlines, beams, ends_by_a_token, given_up,
    ):  # fmt: skip
        expected = await load(scripted_engine)
        assert scripted_engine.added() == expected, load.__name__
        gauges = scripted_engine.gauges()
        assert not scripted_engine.client.held, load.__name__
        for name in ("requests_running", "queue_requests/new", "queue_prompt_tokens", "queue_oldest_age_seconds"):
            assert gauges[name] == 0, (load.__name__, name)
        assert gauges["kv_blocks/active"] == gauges["kv_occupancy_ratio"] == gauges["kv_waste_ratio"] == 0
        assert gauges["kv_blocks/free"] + gauges["kv_blocks/cached"] == NUM_BLOCKS, load.__name__


async def one_request(scripted_engine: ScriptedEngine) -> Counts:
    """9 prompt tokens, 3 generated: 9 computed by the first step, 1 by each of two more."""
    await scripted_engine.ask([1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    await scripted_engine.step(3)
    return total(
        steps(9, 1, 1),
        prompt_tokens(9),
        {"request_prompt_tokens_count": 1, "request_generation_tokens_count": 1, "request_generation_tokens_sum": 3},
        {"generation_tokens": 3, "requests_finished/length": 1},
        times("request_queue_time", 0),  # planned as soon as it arrived
        times("time_to_first_token", 1),  # with the first result
        times("request_prefill_time", 1),
        times("inter_token_latency", 1, 1),
        times("time_per_output_token", 1),  # the mean of these
        times("request_decode_time", 2),
        times("e2e_request_latency", 3),
    )


async def a_prefix_hit(scripted_engine: ScriptedEngine) -> Counts:
    """The first 8 of 10 prompt tokens are two blocks of the request before; the step computes the other 2."""
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
    """6 prompt tokens fill a block and half of another; they are computed once, and both samples share both blocks.

    The second step writes the KV of their first tokens: the first sample to write copies the half block, and the other
    sample then has the original alone.
    """
    await scripted_engine.ask([30, 31, 32, 33, 34, 35], 2, sampling={"seed": 7, "n": 2})
    await scripted_engine.step(2)
    return total(
        steps(6, 2),
        prompt_tokens(6),
        {"kv_cow_copies": 1},
        {"request_prompt_tokens_count": 1, "request_generation_tokens_count": 1, "request_generation_tokens_sum": 4},
        {"generation_tokens": 4, "requests_finished/length": 1},
        times("request_queue_time", 0),
        times("time_to_first_token", 1),  # counted once for the request, not for each sample
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

    Before step 6 both have filled 4 blocks, or will with their next token, and A needs a fifth. B arrived later and is
    preempted with 15 computed tokens; the last of its 16 is not computed yet. A takes one of B's blocks. The other 3
    hold 12 tokens of B's prompt, but B needs 4 blocks to run again. When A has ended, B finds these 12 tokens and
    computes 4 again. This is not counted as a prefix hit, and no token is generated twice.
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
    """The client leaves after 2 of 20 tokens. The third step is in flight: the step is counted, but not its token."""
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
        times("request_decode_time", 1),  # no mean of gaps, because the sequence has no result
        times("e2e_request_latency", 2),
    )


async def a_client_leaves_the_queue(scripted_engine: ScriptedEngine) -> Counts:
    """Four sequences fill the batch. Another request waits and leaves; the four get a token each and end together."""
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
        prompt_tokens(5),  # the prompt of the waiting request was never looked up
        {"request_prompt_tokens_count": 1, "request_generation_tokens_count": 2, "request_generation_tokens_sum": 4},
        {"generation_tokens": 4, "requests_finished/length": 1, "requests_finished/cancelled": 1},
        times("request_queue_time", 0),
        times("time_to_first_token", 1),
        times("request_prefill_time", 1),
        times("request_decode_time", 0),
        times("e2e_request_latency", 1, 0),
    )


async def refusals(scripted_engine: ScriptedEngine) -> Counts:
    """Refuses an invalid temperature, 34 tokens where 33 fit (8 blocks, and a last token without KV), and a request
    while 1 is in the batch and 2 are in the queue. Refused requests appear in no other number."""
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
    """The executor of two samples of 6 + 4 tokens is lost when each has 2 tokens and a third step is in flight.

    step      1  2  3 | 4  5  6
    sample 0  6  1  1 | 8  1        tokens after steps 1 2 and 4 5
    sample 1     1  1 |    4  1     tokens after steps 1 2 and 5 6

    Each sample then has 8 tokens to compute again. Sample 1 begins with the same block as sample 0 and waits for it: it
    finds 4 tokens after step 4 and computes 4. One block is copied on write, as before.
    """
    client = await scripted_engine.ask([10, 11, 12, 13, 14, 15], 4, sampling={"seed": 7, "n": 2})
    await scripted_engine.step(2)
    before = client.token_ids
    assert before[0] != before[1], "the samples would share their second block as well"
    scripted_engine.client.is_up = False
    scripted_engine.client.lose()
    await scripted_engine.quiet()
    gauges = scripted_engine.gauges()
    assert (gauges["queue_requests/executor_lost"], gauges["queue_requests/preempted"]) == (1, 0)
    assert (gauges["requests_running"], gauges["queue_prompt_tokens"], gauges["ready"]) == (0, 2 * 6, 0)
    scripted_engine.client.is_up = True
    await until(lambda: scripted_engine.client.held)  # the engine pauses before it tries again
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
        # The third step was never answered, so step 4 is the clock's third second.
        times("inter_token_latency", *(1, 1, 1), *(1, 2, 1)),
        times("time_per_output_token", 3 / 3, 4 / 3),
        times("request_decode_time", 4),
        times("e2e_request_latency", 5),
    )


async def deadlines(scripted_engine: ScriptedEngine) -> Counts:
    """One deadline passes in the queue, another after the first token, with a second step in flight."""
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
    """Two beams of 2 tokens, of which the better one is returned. Only its tokens count.

    The first step computes the 6 prompt tokens, the second a row for each beam. Both write into the half block that
    they share, so one of them copies it. All tokens arrive together at the end, so there are no gaps and no mean.
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
    """Every token is EOS unless the client ignores EOS; in the second request every token is a stop id."""
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
    """Executors are lost during the first step again and again: a request survives 5 losses, and fails at the sixth.

    It was admitted and never had a result, so its prompt is not counted.
    """
    client = await scripted_engine.ask([21, 8, 8, 8, 8], 9)
    await scripted_engine.quiet()
    for _ in range(6):
        assert scripted_engine.client.held
        await scripted_engine.lose_executor()
    await ended(client)
    return total(
        steps(5, 5, 5, 5, 5, 5),
        {"request_generation_tokens_count": 1, "requests_finished/executors_lost": 1},
        times("request_queue_time", 0),
        times("e2e_request_latency", 0),
    )
