"""Seeds, log-probabilities, bias and penalties work as requested, independent of other requests."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire import AsyncClient, TokenLogprobs
from scheduler.requests.seeds import sample_seed
from tests.support.e2e.stack import TINY, Stack
from tests.support.e2e.streams import OPENINGS, Job, differences, mixed_jobs, outcomes

TOLERANCE = 1e-4
PROMPT = [1, 300, 301, 302, 500, 501, 502, 40, 41, 42, 43, 44, 600, 601, 602, 603, 604, 605, 606, 607, 608, 70, 71]


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def small_pool() -> Iterator[Stack]:
    """Starts a server whose small pool causes preemption and chunked prefill, with two plans in flight."""
    with Stack(num_blocks=33, max_num_seqs=16, max_num_batched_tokens=40) as stack:
        yield stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with stack.client() as client:
        await client.reset_prefix_cache()
        yield client


# --- seeds --------------------------------------------------------------------------------------------------------


async def check_samples_equal_single_requests(client: AsyncClient, other_jobs: list[Job]) -> None:
    """Checks that the samples of a request equal single requests with the derived seeds."""
    common: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 30, "ignore_eos": True}
    for number, n in enumerate((2, 5, 8)):
        prompt, seed = OPENINGS[number], 2**63 + number
        several = Job(prompt, common | {"n": n, "seed": seed})
        single = [Job(prompt, common | {"seed": sample_seed(seed, index)}) for index in range(n)]
        together = (await outcomes(client, [several, *other_jobs]))[0]
        alone = [(await outcomes(client, [job]))[0].outputs[0] for job in single]
        assert together.outputs == alone
        assert len({tuple(output.token_ids) for output in alone}) > 1


async def test_samples_equal_single_requests_with_the_derived_seeds(client: AsyncClient) -> None:
    await check_samples_equal_single_requests(client, [])


async def test_samples_under_preemption_equal_single_requests(small_pool: Stack) -> None:
    small_pool.show_log()
    async with small_pool.client() as client:
        await check_samples_equal_single_requests(client, mixed_jobs(12))
        assert (await client.pool_summary()).num_preemptions > 0


# --- log-probabilities --------------------------------------------------------------------------------------------


def reference(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Returns transformers' log-probabilities; row i is for the token at position i + 1."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)


def check_logprobs(entries: list[TokenLogprobs], rows: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    """Compares each entry with its row; a rank must lie between the bounds that the tolerance gives."""
    assert len(entries) == len(token_ids) == len(rows)
    for entry, row, token_id in zip(entries, rows, token_ids, strict=True):
        assert entry.chosen.token_id == token_id
        assert entry.chosen.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        surely_above = int((row > row[token_id] + TOLERANCE).sum())
        perhaps_above = int((row > row[token_id] - TOLERANCE).sum())
        assert surely_above < entry.chosen.rank <= perhaps_above
        assert [each.rank for each in entry.top] == list(range(1, num_top + 1))
        best = row.topk(num_top).values if num_top else row[:0]
        assert [each.logprob for each in entry.top] == pytest.approx(best.tolist(), abs=TOLERANCE)
        assert [float(row[each.token_id]) for each in entry.top] == pytest.approx(best.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("num_top", [0, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_logprobs_equal_transformers(
    client: AsyncClient, tiny: PreTrainedModel, num_top: int, temperature: float
) -> None:
    """Log-probabilities are those of the model's own distribution, even if the logits are changed."""
    changed = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {77: 5.0}, "min_tokens": 10}
    for changes in ({}, changed):
        completion = await client.complete(
            PROMPT, logprobs=num_top, prompt_logprobs=num_top, max_tokens=24, temperature=temperature, seed=5, **changes
        )
        output = list(completion.token_ids)
        rows = reference(tiny, PROMPT + output)
        check_logprobs(list(completion.prompt_logprobs), rows[: len(PROMPT) - 1], PROMPT[1:], num_top)
        check_logprobs(list(completion.sequences[0].logprobs), rows[len(PROMPT) - 1 : -1], output, num_top)


async def test_logprobs_equal_transformers_with_prefix_hits_chunks_and_preemption(
    small_pool: Stack, tiny: PreTrainedModel
) -> None:
    small_pool.show_log()
    prompt = PROMPT * 4
    options: dict[str, Any] = {"prompt_logprobs": 2, "logprobs": 2, "max_tokens": 30, "ignore_eos": True}
    async with small_pool.client() as client:
        completions = [await client.complete(prompt, **options, temperature=0)]  # publishes the blocks of the prompt
        # The samples of one request run at the same time, and 11 of them need more blocks than there are.
        completions += await asyncio.gather(*(client.complete(prompt, **options, seed=n, n=n) for n in (1, 11)))
        assert (await client.pool_summary()).num_preemptions > 0
    for completion in completions:
        for sequence in completion.sequences:
            output = list(sequence.token_ids)
            rows = reference(tiny, prompt + output)
            check_logprobs(list(completion.prompt_logprobs), rows[: len(prompt) - 1], prompt[1:], 2)
            check_logprobs(list(sequence.logprobs), rows[len(prompt) - 1 : -1], output, 2)


async def test_logprobs_are_aligned_with_tokens_when_text_is_held_back(client: AsyncClient) -> None:
    plain = await client.complete("Once upon a time", temperature=0, max_tokens=20, logprobs=1)
    words = plain.text.split()
    stopped = await client.complete("Once upon a time", temperature=0, max_tokens=20, logprobs=1, stop=[words[4]])
    count = len(stopped.token_ids)
    assert stopped.token_ids == plain.token_ids[:count]
    assert [each.chosen.token_id for each in stopped.sequences[0].logprobs] == list(stopped.token_ids)
    assert stopped.sequences[0].logprobs == plain.sequences[0].logprobs[:count]


async def test_greedy_output_ends_with_eos(client: AsyncClient, tiny: PreTrainedModel) -> None:
    sequence = (await client.complete("Once upon a time", temperature=0)).sequences[0]
    assert sequence.reason == "eos"
    assert sequence.text.strip()
    assert sequence.token_ids[-1] == tiny.generation_config.eos_token_id


async def test_a_prompt_of_one_token_has_no_logprobs(client: AsyncClient) -> None:
    completion = await client.complete([300], prompt_logprobs=3, max_tokens=2)
    assert completion.prompt_logprobs == ()


# --- changes of the logits ----------------------------------------------------------------------------------------


async def test_only_allowed_tokens_are_generated(client: AsyncClient) -> None:
    allowed = [300, 77, 1000]
    completion = await client.complete(PROMPT, allowed_token_ids=allowed, max_tokens=40, seed=1, temperature=5)
    assert set(completion.token_ids) <= set(allowed)
    only = await client.complete(PROMPT, allowed_token_ids=[77], max_tokens=5, temperature=0, logprobs=0)
    assert only.token_ids == (77,) * 5
    assert all(entry.chosen.logprob < math.log(0.9) for entry in only.sequences[0].logprobs)  # the model's own


async def test_logit_bias_forces_and_bans_tokens(client: AsyncClient) -> None:
    plain = await client.complete(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    forced = await client.complete(PROMPT, max_tokens=12, temperature=0, logit_bias={77: 100.0}, ignore_eos=True)
    assert set(forced.token_ids) == {77}
    banned = await client.complete(
        PROMPT, max_tokens=12, temperature=0, logit_bias=dict.fromkeys(plain.token_ids, -100.0), ignore_eos=True
    )
    assert not set(banned.token_ids) & set(plain.token_ids)


async def test_penalties_follow_their_definitions(client: AsyncClient, tiny: PreTrainedModel) -> None:
    """Greedy output is compared step by step with penalties computed from their definitions."""
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.3}
    completion = await client.complete(PROMPT, **options, **penalties)
    output = list(completion.token_ids)
    with torch.inference_mode():
        logits = tiny(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1]
    logits = logits.clone()  # the original cannot be modified in place
    for step, (row, token_id) in enumerate(zip(logits, output, strict=True)):
        seen = torch.tensor(sorted({*PROMPT, *output[:step]}))
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.4, row[seen] * 1.4)
        counts = torch.bincount(torch.tensor(output[:step], dtype=torch.long), minlength=len(row))
        row -= 0.7 * counts + 0.3 * (counts > 0)
        assert token_id == int(row.argmax()), step
    assert output != list((await client.complete(PROMPT, **options)).token_ids)


async def test_tokens_do_not_depend_on_other_requests(client: AsyncClient) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1, "repetition_penalty": 1.2},
        {"seed": 2, "frequency_penalty": 0.5, "top_k": 30},
        {"seed": 3, "presence_penalty": 0.5, "min_p": 0.02, "n": 2},
        {"seed": 4, "logit_bias": {77: 2.0}, "logprobs": 3},
        {"seed": 5, "allowed_token_ids": list(range(10, 900)), "top_p": 0.9},
        {"seed": 6, "prompt_logprobs": 2, "min_tokens": 20},
    ]
    jobs = [
        Job(OPENINGS[number % 8], {"max_tokens": 24, "ignore_eos": True} | kinds[number % 7]) for number in range(56)
    ]
    expected = [(await outcomes(client, [job]))[0] for job in jobs[:14]]
    assert differences((await outcomes(client, jobs))[:14], expected) == []
