"""Batching and memory modes differ in speed and memory, but not in their output."""

import asyncio

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quire import CapacityExceededError
from scheduler.core import BATCHING, CONTIGUOUS, KV_ALLOCATIONS, PAGED
from tests.e2e.test_equality import check_greedy, complete, has_prefix_hits, mixed_requests
from tests.support.e2e.stack import TINY, Stack

pytestmark = pytest.mark.exhaustive

REQUESTS = mixed_requests(AutoConfig.from_pretrained(TINY).vocab_size, 14, max_prompt=90, max_output=30)
"""More requests than slots and blocks can hold at once, and prompts longer than a step."""

FLAGS = {"num_blocks": 29, "max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 64}
"""A pool of 28 usable blocks: three contiguous runs of 128 token slots, and a few more blocks."""

_OTHERS = KV_ALLOCATIONS.keys() - {PAGED.name, CONTIGUOUS.name}

MODES = [
    *((PAGED.name, batching) for batching in BATCHING),
    *((CONTIGUOUS.name, batching) for batching in BATCHING),
    *((memory, batching) for memory, batching in zip(sorted(_OTHERS), BATCHING, strict=False)),
]
"""Each batching with each of the two kinds of memory; further contiguous memories reserve other lengths only."""


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


async def test_every_mode_generates_the_same_tokens(tiny: PreTrainedModel) -> None:
    """The modes are the scheduler's, so all of them share an executor."""
    assert {memory for memory, _ in MODES} == KV_ALLOCATIONS.keys()
    async with Stack(apart=True, memory=MODES[0][0], batching=MODES[0][1], **FLAGS) as stack:
        for number, (memory, batching) in enumerate(MODES):
            if number > 0:
                await stack.restart_scheduler(memory=memory, batching=batching)
            async with stack.client() as client:
                completions = await asyncio.gather(*(complete(client, request) for request in REQUESTS))
                num_preemptions = (await client.block_map()).num_preemptions
            for request, completion in zip(REQUESTS, completions, strict=True):
                check_greedy(tiny, request, completion)
            if memory == PAGED.name:
                assert has_prefix_hits(completions)
            else:
                assert not has_prefix_hits(completions)
                assert num_preemptions == 0


async def test_contiguous_memory_refuses_requests_that_share_blocks() -> None:
    async with Stack(memory=CONTIGUOUS.name, **FLAGS) as stack, stack.client() as client:
        for options in ({"n": 2}, {"beam_width": 2}):
            with pytest.raises(CapacityExceededError, match="share blocks, which contiguous memory cannot"):
                await client.complete("Once", max_tokens=4, **options)
