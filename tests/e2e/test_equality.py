"""Greedy output equals transformers', token for token, with any batching, preemption, sharing or chunking.

Greedy output is correct if every token is the argmax of the logits that transformers computes from the tokens before
it. One forward pass of transformers over prompt and output checks all tokens at once; some requests are also compared
with `transformers.generate` itself.

Near-ties have no tolerance: a different token is a failure, reported with the gap between the two logits. None has been
seen in float32: rounding changes these models' logits by about 1e-5, and their closest logits are further apart.
"""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire import AsyncClient, Completion
from tests.support.e2e.stack import TINY, Stack
from tests.support.executor.checkpoints import make_checkpoint

FAMILIES = ["llama", "llama-llama3", "mistral-window", "qwen2", "qwen3"]


@dataclass(frozen=True, slots=True)
class Greedy:
    """One greedy request, run to its full length."""

    prompt: list[int]
    max_tokens: int


def mixed_requests(vocab_size: int, num_requests: int, max_prompt: int, max_output: int) -> list[Greedy]:
    """Returns requests with lengths from 1 to the maximum; every third prompt begins with the same tokens."""
    generator = torch.Generator().manual_seed(num_requests)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return [int(i) for i in torch.randint(low, high, (count,), generator=generator)]

    shared = draw(3, vocab_size, max_prompt // 2)
    requests = []
    for i in range(num_requests):
        head = shared if i % 3 == 0 else []
        tail = draw(3, vocab_size, draw(1, max_prompt - len(head) + 1)[0])
        requests.append(Greedy(head + tail, draw(1, max_output + 1)[0]))
    return requests


async def complete(client: AsyncClient, request: Greedy) -> Completion:
    return await client.complete(request.prompt, temperature=0, max_tokens=request.max_tokens, ignore_eos=True)


def check_greedy(model: PreTrainedModel, request: Greedy, completion: Completion) -> None:
    """Checks that every token is the argmax of transformers' logits, given the tokens before it."""
    output = list(completion.sequences[0].token_ids)
    assert len(output) == request.max_tokens
    with torch.inference_mode():
        logits = model(torch.tensor([request.prompt + output])).logits[0, len(request.prompt) - 1 : -1]
    best = logits.argmax(dim=-1).tolist()
    for position, (token_id, wanted) in enumerate(zip(output, best, strict=True)):
        gap = float(logits[position, wanted] - logits[position, token_id])
        assert token_id == wanted, f"token {position} is {token_id}, not {wanted}; their logits are {gap:.2g} apart"


def check_generate(model: PreTrainedModel, request: Greedy, completion: Completion) -> None:
    """Checks that the output equals that of `transformers.generate`."""
    tokens = torch.tensor([request.prompt])
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=request.max_tokens,
        min_new_tokens=request.max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert list(completion.sequences[0].token_ids) == output[0, len(request.prompt) :].tolist()


def has_prefix_hits(completions: list[Completion]) -> bool:
    return any(completion.sequences[0].usage.cached_tokens > 0 for completion in completions)


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.mark.parametrize("max_in_flight", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
async def test_embedded_checkpoint_equals_transformers_without_memory_pressure(
    tiny: PreTrainedModel, max_in_flight: int
) -> None:
    requests = mixed_requests(tiny.config.vocab_size, 64, max_prompt=90, max_output=40)
    with Stack(max_in_flight=max_in_flight) as stack:
        async with stack.client() as client:
            alone = [await complete(client, request) for request in requests[:4]]
            together = await asyncio.gather(*(complete(client, request) for request in requests))
            again = await asyncio.gather(*(complete(client, request) for request in requests[::3]))
            block_map = await client.block_map()
    assert block_map.num_preemptions == 0
    assert has_prefix_hits(again)
    for request, completion in zip(requests, alone, strict=False):
        check_generate(tiny, request, completion)
    for request, completion in zip(requests + requests[::3], together + again, strict=True):
        check_greedy(tiny, request, completion)


@pytest.mark.parametrize("max_in_flight", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
async def test_embedded_checkpoint_equals_transformers_in_a_pool_that_is_too_small(
    tiny: PreTrainedModel, max_in_flight: int
) -> None:
    requests = mixed_requests(tiny.config.vocab_size, 48, max_prompt=90, max_output=40)
    flags = {"num_blocks": 17, "max_num_seqs": 16, "max_num_batched_tokens": 40, "max_in_flight": max_in_flight}
    with Stack(**flags) as stack:
        async with stack.client() as client:
            completions = await asyncio.gather(*(complete(client, request) for request in requests))
            block_map = await client.block_map()
    assert block_map.num_preemptions > 0
    assert sum(completion.sequences[0].usage.num_preemptions for completion in completions) > 0
    assert has_prefix_hits(completions)
    assert max(len(request.prompt) for request in requests) > flags["max_num_batched_tokens"]
    for request, completion in zip(requests, completions, strict=True):
        check_greedy(tiny, request, completion)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    checkpoint = make_checkpoint(request.param, directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # the scheduler needs a tokenizer; the text is not checked
        shutil.copy(Path(TINY) / name, directory / name)
    return str(directory), checkpoint.model


async def test_every_family_equals_transformers_under_pressure(family: tuple[str, PreTrainedModel]) -> None:
    """The run has preemption, chunked prefill, prefix hits, and two plans in flight."""
    directory, model = family
    requests = mixed_requests(model.config.vocab_size, 48, max_prompt=70, max_output=40)
    with Stack(model=directory, num_blocks=15, max_num_seqs=16, max_num_batched_tokens=40) as stack:
        async with stack.client() as client:
            completions = await asyncio.gather(*(complete(client, request) for request in requests))
            block_map = await client.block_map()
    assert block_map.num_preemptions > 0
    assert has_prefix_hits(completions)
    for request, completion in zip(requests, completions, strict=True):
        check_greedy(model, request, completion)
    for request, completion in zip(requests[:3], completions, strict=False):
        check_generate(model, request, completion)
