"""Prompts of many thousand tokens: other streams go on, memory is bounded, cancels and recovery work in their middle.

LONG_PROMPT_TOKENS=100000 pytest tests/e2e/test_long_prompts.py
"""

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from quire import AsyncClient, Delta, RunningSequence, Started, TokenLogprobs
from tests.support.e2e.long_context import MAX_MODEL_LEN, NUM_TOKENS, long_prompt, write_checkpoint
from tests.support.e2e.stack import Stack
from tests.support.waiting import until

TIMEOUT_S = 300.0 + NUM_TOKENS / 10

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(2 * TIMEOUT_S)]

BLOCK_SIZE = 16
NUM_PROMPTS = 3
"""Prompts that the pool holds."""

MAX_GROWTH = 48 << 20
"""Bytes by which a service may grow beyond what it had when the first long prompt had ended: heaps are fragmented."""
BYTES_PER_TOKEN = 1024
"""Bytes of a prompt token in each service, beside the KV pool: ids in several places, block tables, a hash chain."""

Answer = tuple[list[int], list[TokenLogprobs]]


@pytest.fixture(scope="module")
def long_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = write_checkpoint(tmp_path_factory.mktemp("long"))
    with Stack(model=model, num_blocks=NUM_PROMPTS * (NUM_TOKENS // BLOCK_SIZE + 64), num_threads=2) as stack:
        yield stack


@pytest.fixture
def served(long_stack: Stack) -> Stack:
    long_stack.show_log()
    return long_stack


async def answer(client: AsyncClient, prompt: list[int], salt: str) -> Answer:
    """Returns four greedy tokens, with log-probabilities whose bits depend on every token of the prompt."""
    token_ids, logprobs = list[int](), list[TokenLogprobs]()
    options = {"max_tokens": 4, "ignore_eos": True, "temperature": 0, "logprobs": 3, "cache_salt": salt}
    async for event in client.generate(prompt, timeout_s=TIMEOUT_S, **options):  # type: ignore[arg-type]
        if isinstance(event, Delta):
            token_ids += event.token_ids
            logprobs += event.logprobs
    return token_ids, logprobs


async def prefilling(client: AsyncClient, *, at_least: int = 0) -> RunningSequence | None:
    """Returns the sequence that computes a long prompt, if it has computed so many tokens of it."""
    with suppress(Exception):  # the scheduler may be starting
        for sequence in (await client.block_map()).sequences:
            if sequence.num_prompt_tokens == NUM_TOKENS and sequence.prefill_share is not None:
                return sequence if sequence.num_computed_tokens >= at_least else None
    return None


async def in_the_middle(client: AsyncClient) -> RunningSequence:
    """Waits until a third of the long prompt is computed."""
    found: list[RunningSequence] = []

    async def has_computed() -> bool:
        sequence = await prefilling(client, at_least=NUM_TOKENS // 3)
        found.extend([sequence] if sequence else [])
        return bool(found)

    await until(has_computed, TIMEOUT_S, what="a third of the prompt is computed", interval_s=0.02)
    return found[0]


def resident_bytes(stack: Stack) -> dict[str, int]:
    return {name: psutil.Process(stack.pid(name)).memory_info().rss for name in ("scheduler", "executor")}


async def test_a_long_prompt_changes_no_token_of_a_stream_beside_it_nor_do_its_cuts_change_its_own(
    served: Stack,
) -> None:
    """Beside decodes it is cut into other chunks, under a salt that hides the blocks which were computed alone."""
    prompt, short = long_prompt(1), {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    async with served.client() as client:
        alone = await answer(client, prompt, "alone")
        mark_ns = time.monotonic_ns()
        beside: list[int] = []

        async def stream() -> None:
            async for event in client.generate("Once upon a time", timeout_s=TIMEOUT_S, **short):  # type: ignore[arg-type]
                if isinstance(event, Delta):
                    beside.extend(event.token_ids)

        task = asyncio.create_task(stream())
        await until(lambda: len(beside) > 5 or task.done(), TIMEOUT_S)
        num_before = len(beside)
        together = await answer(client, prompt, "together")
        num_after = len(beside)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        cuts = {step.num_tokens - step.num_decodes for step in await client.step_trace(mark_ns) if step.num_decodes}
        completion = await client.complete("Once upon a time", **short | {"max_tokens": num_after})  # type: ignore[arg-type]
    assert together == alone
    assert len(cuts) > 1, "beside decodes the chunks have other sizes"
    assert num_after > num_before + 10, "the stream went on while the prompt was computed"
    assert list(completion.sequences[0].token_ids) == beside[:num_after]


async def test_memory_does_not_grow_with_the_number_of_long_prompts(served: Stack) -> None:
    async with served.client() as client:
        before = resident_bytes(served)
        await answer(client, long_prompt(10), "")
        after_one = resident_bytes(served)
        for seed in (11, 12, 13):
            await answer(client, long_prompt(seed), "")
        after = resident_bytes(served)
    for name in after:
        first, later = after_one[name] - before[name], after[name] - after_one[name]
        assert first < MAX_GROWTH + BYTES_PER_TOKEN * NUM_TOKENS, f"the {name} has grown by {first:,} bytes"
        assert later < MAX_GROWTH, f"the {name} has grown by {later:,} bytes more"


async def test_a_cancel_in_the_middle_of_a_prefill_takes_effect_within_the_steps_in_flight(served: Stack) -> None:
    async with served.client() as client:
        task = asyncio.create_task(answer(client, long_prompt(20), ""))
        await in_the_middle(client)
        cancelled_ns = time.monotonic_ns()
        task.cancel()

        async def is_idle() -> bool:
            return (await client.block_map()).summary.num_active_blocks == 0

        await until(is_idle, TIMEOUT_S, what="all blocks are free", interval_s=0.02)
        steps = [step for step in await client.step_trace() if step.committed_ns > cancelled_ns]
    assert len(steps) <= 3, "two in flight, and one that was planned before the scheduler heard of the cancel"


@pytest.mark.parametrize("service", ["executor", "scheduler"])
async def test_a_service_that_dies_in_the_middle_of_a_prefill_changes_nothing(served: Stack, service: str) -> None:
    prompt = long_prompt(30)
    async with served.client() as client:
        undisturbed = await answer(client, prompt, "undisturbed")
        task = asyncio.create_task(answer(client, prompt, service))
        await in_the_middle(client)
        killed = served.send(service, signal.SIGKILL)
        assert await task == undisturbed
    # On busy cores the answer may be complete before the kill; the next test needs the service.
    await until(lambda: served.pid(service) not in (None, killed), TIMEOUT_S, what="the service is replaced")
    await served.until_health("SERVING")


async def test_what_can_never_fit_is_refused_at_once_and_touches_no_stream(served: Stack) -> None:
    async with served.client() as client:
        expected = await answer(client, [7, 8, 9], "")
        for num_tokens in (MAX_MODEL_LEN, 1_000_000):
            with pytest.raises(Exception, match=f"prompt is too long: {num_tokens} tokens > ") as failed:
                await answer(client, [7] * num_tokens, "")
            assert type(failed.value).__name__ == "CapacityExceededError"
        assert await answer(client, [7, 8, 9], "") == expected


async def test_the_text_of_a_long_prompt_is_taken_as_well(served: Stack) -> None:
    """It has half a megabyte per 100,000 tokens, and is tokenised beside other requests."""
    text = "Once upon a time there was a little fox. " * (NUM_TOKENS // 12)
    async with served.client() as client:
        async for event in client.generate(text, max_tokens=1, timeout_s=TIMEOUT_S):
            if isinstance(event, Started):
                assert event.prompt_tokens > NUM_TOKENS // 2
