"""Beam search equals transformers.generate(num_beams=…) in tokens, order and scores, also under load."""

import asyncio
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation import GenerateBeamDecoderOnlyOutput

from quire import AsyncClient, BlockState, Completion
from tests.support.e2e.stack import TINY, Stack
from tests.support.e2e.streams import StreamGroup, differences, mixed_jobs, outcomes
from tests.support.e2e.waiting import until
from tests.support.executor.checkpoints import make_checkpoint

TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Search:
    """One beam search; without eos_token_id, EOS is ignored."""

    prompt: tuple[int, ...]
    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    eos_token_id: int | None = None


def searches(vocab_size: int, eos_token_id: int | None, longest: int = 40) -> list[Search]:
    generator = torch.Generator().manual_seed(vocab_size)

    def prompt(num_tokens: int) -> tuple[int, ...]:
        return tuple(int(i) for i in torch.randint(3, vocab_size, (num_tokens,), generator=generator))

    shared = prompt(longest)
    return [
        Search(shared, 2, 20),
        Search(shared[: longest // 2] + prompt(5), 4, 24, eos_token_id=eos_token_id),
        Search(prompt(1), 3, 17, length_penalty=0.0, eos_token_id=eos_token_id),
        Search(prompt(16), 6, 20, length_penalty=2.0, eos_token_id=eos_token_id),
        Search(prompt(17), 4, 30, early_stopping=True, eos_token_id=eos_token_id),
        Search(prompt(9), 1, 20, length_penalty=-1.0, eos_token_id=eos_token_id),
        Search(shared + prompt(3), 5, 12, eos_token_id=eos_token_id),
    ]


async def run(client: AsyncClient, search: Search) -> Completion:
    return await client.complete(
        search.prompt,
        beam_width=search.width,
        n=search.width,
        max_tokens=search.max_tokens,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        ignore_eos=search.eos_token_id is None,
    )


@cache
def expected_of(model: PreTrainedModel, search: Search) -> GenerateBeamDecoderOnlyOutput:
    """Returns the result of transformers; it is cached, because several tests need the same one."""
    tokens = torch.tensor([search.prompt])
    return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        num_beams=search.width,
        num_return_sequences=search.width,
        max_new_tokens=search.max_tokens,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        do_sample=False,
        eos_token_id=search.eos_token_id,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )


def check(model: PreTrainedModel, search: Search, completion: Completion) -> None:
    """Compares a completion with transformers' result of the same search."""
    expected = expected_of(model, search)
    assert [sequence.index for sequence in completion.sequences] == list(range(search.width))
    scores = [sequence.score for sequence in completion.sequences]
    assert scores == sorted(scores, key=lambda score: -(score or 0.0))
    for index, sequence in enumerate(completion.sequences):
        wanted = expected.sequences[index, len(search.prompt) :].tolist()
        if search.eos_token_id is not None and search.eos_token_id in wanted:
            wanted = wanted[: wanted.index(search.eos_token_id) + 1]
        assert list(sequence.token_ids) == wanted[: len(sequence.token_ids)], (search, index)
        assert len(sequence.token_ids) == len(wanted)
        # With width 1, transformers uses greedy search, which has no scores.
        if search.width > 1:
            assert sequence.score == pytest.approx(float(expected.sequences_scores[index]), abs=TOLERANCE)


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


async def test_searches_alone_and_together_equal_transformers(stack: Stack, tiny: PreTrainedModel) -> None:
    asked = searches(tiny.config.vocab_size, tiny.generation_config.eos_token_id)
    async with stack.client() as client:
        alone = [await run(client, search) for search in asked]
        together = await asyncio.gather(*(run(client, search) for search in asked))
    for search, one, other in zip(asked, alone, together, strict=True):
        check(tiny, search, one)
        check(tiny, search, other)


async def test_beams_that_reach_eos_equal_transformers(stack: Stack, tiny: PreTrainedModel) -> None:
    """The prompts are beginnings of the model's own output, so that beams reach EOS."""
    async with stack.client() as client:
        story = list((await client.complete("Once upon a time", temperature=0)).token_ids)
        assert story[-1] == tiny.generation_config.eos_token_id
        for cut, penalty in ((4, 1.0), (8, 0.0), (12, 2.0)):
            search = Search(tuple(story[:-cut]), 4, 40, length_penalty=penalty, eos_token_id=story[-1])
            completion = await run(client, search)
            assert any(sequence.reason == "eos" for sequence in completion.sequences)
            check(tiny, search, completion)


@pytest.mark.parametrize("max_in_flight", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
async def test_searches_in_a_pool_that_is_too_small_equal_transformers(
    tiny: PreTrainedModel, max_in_flight: int
) -> None:
    """The run has preemption, chunked prefill, prefix hits, other requests that sample, and plans in flight."""
    asked = searches(tiny.config.vocab_size, tiny.generation_config.eos_token_id)
    flags = {"num_blocks": 33, "max_num_seqs": 16, "max_num_batched_tokens": 24, "max_in_flight": max_in_flight}
    with Stack(**flags) as stack:
        async with stack.client() as client:
            jobs = mixed_jobs(10)
            expected = [(await outcomes(client, [job]))[0] for job in jobs]
            streams = StreamGroup(client, jobs).start()
            completions = await asyncio.gather(*(run(client, search) for search in asked * 2))
            assert differences(await streams.ended(), expected) == []
            summary = await client.pool_summary()
            assert summary.num_preemptions > 0
            await until_empty(client)
    for search, completion in zip(asked * 2, completions, strict=True):
        check(tiny, search, completion)


async def test_searches_with_a_random_checkpoint_equal_transformers(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # the scheduler needs a tokenizer; the text is not checked
        shutil.copy(Path(TINY) / name, tmp_path / name)
    asked = searches(checkpoint.model.config.vocab_size, None)
    with Stack(model=str(tmp_path), num_blocks=64, max_num_seqs=16, max_num_batched_tokens=40) as stack:
        async with stack.client() as client:
            completions = await asyncio.gather(*(run(client, search) for search in asked))
    for search, completion in zip(asked, completions, strict=True):
        check(checkpoint.model, search, completion)


async def test_a_search_can_return_fewer_beams_than_its_width(stack: Stack) -> None:
    async with stack.client() as client:
        all_of_them = await client.complete("Once upon a time", beam_width=4, n=4, max_tokens=12)
        best = await client.complete("Once upon a time", beam_width=4, max_tokens=12)
    assert len(best.sequences) == 1
    assert best.token_ids == all_of_them.token_ids
    assert best.text == all_of_them.texts[0]


async def test_beams_share_blocks_and_release_them(stack: Stack) -> None:
    async with stack.client() as client:
        before = await client.pool_summary()
        prompt = [5 + number for number in range(37)]
        async with client.generate(prompt, beam_width=6, max_tokens=300, ignore_eos=True):
            shared = 0
            for _ in range(400):
                block_map = await client.block_map()
                shared = max(shared, block_map.num_shared_blocks)
                if shared >= 2 and block_map.num_cow_copies > before.num_cow_copies:
                    break
            assert shared >= 2
        await until_empty(client)


async def until_empty(client: AsyncClient) -> None:
    async def is_empty() -> bool:
        return not (await client.block_map()).num_blocks(BlockState.ACTIVE)

    await until(is_empty)
