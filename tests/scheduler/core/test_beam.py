"""Compares the beam search with that of transformers: the same beams and scores, on untrained models."""

from collections.abc import Iterator
from math import inf
from random import Random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scheduler.core import BeamParams, BeamResult, FinishReason
from scheduler.core.beams.search import BeamSearch, Candidates, Survivor

VOCAB_SIZE = 24
EOS, LENGTH, STOP = FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP


def build_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def top_candidates(model: LlamaForCausalLM, texts: list[list[int]], number: int) -> list[Candidates]:
    logprobs = model(torch.tensor(texts)).logits[:, -1].float().log_softmax(-1)
    top = logprobs.topk(number)
    return [(ids.tolist(), values.tolist()) for ids, values in zip(top.indices, top.values, strict=True)]


def search(
    model: LlamaForCausalLM, prompt: list[int], params: BeamParams, end_ids: list[int], max_new_tokens: int
) -> tuple[list[BeamResult], int]:
    """Returns the results and the number of steps."""
    beam_search = BeamSearch(params, dict.fromkeys(end_ids, EOS), max_new_tokens)
    texts, num_steps = [prompt], 0
    while True:
        num_steps += 1
        survivors = beam_search.decide(top_candidates(model, texts, params.num_candidates(len(end_ids))))
        if not survivors:
            return beam_search.results(), num_steps
        texts = [[*texts[survivor.parent], survivor.token_id] for survivor in survivors]


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("width", [2, 3, 4, 5, 6])
def test_finds_the_same_beams_as_transformers(width: int, length_penalty: float, early_stopping: bool) -> None:
    torch.set_num_threads(1)
    reasons = set()
    for seed in range(8):
        random = Random(f"{seed} {width} {length_penalty} {early_stopping}")
        model = build_model(seed)
        prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 6))]
        end_ids = random.sample(range(VOCAB_SIZE), seed % 3)
        if seed % 2:  # one more end token, which occurs early
            end_ids = sorted({*end_ids, random.choice(top_candidates(model, [prompt], width)[0][0])})
        max_new_tokens = random.randint(1, 12)
        num_returned = random.randint(1, width)
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=num_returned,
            do_sample=False,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_new_tokens=max_new_tokens,
            eos_token_id=end_ids or None,
            pad_token_id=VOCAB_SIZE - 1,
            return_dict_in_generate=True,
            output_scores=True,
        )
        params = BeamParams(width, num_returned, length_penalty, early_stopping)
        results, num_steps = search(model, prompt, params, end_ids, max_new_tokens)
        assert len(results) == num_returned
        assert num_steps == len(output.scores), "the search takes as many steps"
        for result, sequence, score in zip(results, output.sequences, output.sequences_scores, strict=True):
            num_tokens = len(prompt) + len(result.token_ids)
            assert [*prompt, *result.token_ids] == sequence[:num_tokens].tolist()
            assert set(sequence[num_tokens:].tolist()) <= {VOCAB_SIZE - 1}, "only padding follows"
            assert result.score == pytest.approx(float(score), abs=1e-4)
            assert (result.reason is EOS) == (result.token_ids[-1] in end_ids)
            assert result.reason is EOS or len(result.token_ids) == max_new_tokens
            reasons.add(result.reason)
    # A penalty below 1 favours short outputs, one above 0 long ones.
    assert EOS in reasons or length_penalty >= 1
    assert LENGTH in reasons or length_penalty <= 0


def test_equal_scores_are_ordered_by_beam_and_then_by_rank() -> None:
    beams = BeamSearch(BeamParams(2, 2), {}, 9)
    assert beams.decide([([7, 3, 5, 1], [-1.0, -1.0, -1.0, -1.0])]) == [Survivor(0, 7), Survivor(0, 3)]
    equal = ([4, 2, 8, 6], [-1.0, -1.0, -2.0, -2.0])
    assert beams.decide([equal, equal]) == [Survivor(0, 4), Survivor(0, 2)]
    assert beams.decide([([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0]), ([9, 8, 7, 6], [-1.0, -1.5, -3.0, -4.0])]) == [
        Survivor(0, 1),
        Survivor(1, 9),
    ]


def test_only_the_first_candidates_may_end() -> None:
    """In a search of width two, a third best candidate that ends is dropped."""
    beams = BeamSearch(BeamParams(2, 2), {0: EOS, 1: STOP}, 9)
    start = ([5, 6, 0, 7, 1, 8], [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    assert beams.decide([start]) == [Survivor(0, 5), Survivor(0, 6)]
    first = ([1, 5, 6, 7, 0, 8], [-0.1, -2.5, -3.0, -3.5, -4.0, -5.0])
    second = ([0, 5, 6, 7, 1, 8], [-0.1, -2.5, -3.0, -3.5, -4.0, -5.0])
    assert beams.decide([first, second]) == []
    assert beams.results() == [BeamResult([5, 1], -1.1 / 2, STOP), BeamResult([6, 0], -2.1 / 2, EOS)]


def test_a_token_of_probability_zero_is_no_candidate() -> None:
    """With few allowed tokens, beams disappear and return, and the search may return fewer results than requested."""
    beams = BeamSearch(BeamParams(3, 3), {0: EOS}, 3)
    impossible = [-inf] * 4
    assert beams.decide([([5, 0, 1, 2, 3, 4], [-0.5, -0.9, *impossible])]) == [Survivor(0, 5)]
    assert len(beams.decide([([5, 6, 1, 2, 3, 4], [-0.5, -0.9, *impossible])])) == 2
    assert beams.decide([([0, 6, 1, 2, 3, 4], [-0.5, -inf, *impossible])] * 2) == []
    found = beams.results()
    assert [result.token_ids for result in found] == [[5, 5, 0], [5, 6, 0], [0]]
    lonely = BeamSearch(BeamParams(2, 2), {}, 1)
    assert lonely.decide([([3, 0, 1, 2], [0.0, -inf, -inf, -inf])]) == []
    assert lonely.results() == [BeamResult([3], 0.0, LENGTH), BeamResult([], -inf, LENGTH)]


def by_sorting_everything(
    scores: list[float], candidates: list[Candidates], width: int, num_candidates: int, end_ids: set[int]
) -> tuple[list[Survivor], list[float]]:
    """Returns the beams that survive one step, and their scores, by sorting all candidates."""
    best = [
        (scores[beam] + value, beam, token_id)
        for beam, (token_ids, values) in enumerate(candidates)
        for token_id, value in zip(token_ids, values, strict=True)
    ]
    best = sorted(best, key=lambda candidate: -candidate[0])[:num_candidates]
    going_on = [candidate for candidate in best if candidate[2] not in end_ids][:width]
    return [Survivor(beam, token_id) for _, beam, token_id in going_on], [score for score, _, _ in going_on]


@pytest.mark.parametrize("seed", range(20))
def test_lazy_ranking_equals_sorting_all_candidates(seed: int) -> None:
    """Scores are sums of quarters, so they are often equal and always exact."""
    random = Random(seed)
    params = BeamParams(random.randint(1, 8), 1, length_penalty=0.0)
    end_ids = set(range(random.randint(0, 6)))
    num_candidates = params.num_candidates(len(end_ids))
    beams, scores = BeamSearch(params, dict.fromkeys(end_ids, EOS), 99), [0.0]
    for _ in range(6):
        candidates: list[Candidates] = [
            (
                random.sample(range(60), num_candidates),
                sorted((-random.randint(0, 12) / 4 for _ in range(num_candidates)), reverse=True),
            )
            for _ in scores
        ]
        expected, scores = by_sorting_everything(scores, candidates, params.width, num_candidates, end_ids)
        survivors = beams.decide(candidates)
        if not survivors:  # enough have ended, and no better one can be found
            break
        assert survivors == expected


class Counting(list[float]):
    """A list that counts how many of its values were read."""

    num_read = 0

    def __iter__(self) -> Iterator[float]:
        for value in super().__iter__():
            self.num_read += 1
            yield value


def test_the_widest_search_with_most_stop_ids_reads_few_of_its_candidates() -> None:
    """Reading a quarter of a million candidates would delay every other request."""
    params = BeamParams(64, 64)
    num_candidates = params.num_candidates(64)
    beams = BeamSearch(params, dict.fromkeys(range(64), STOP), 99)
    token_ids = range(100, 100 + num_candidates)
    start = Counting(-float(rank) for rank in range(num_candidates))
    assert len(beams.decide([(token_ids, start)])) == 64
    reports = [Counting(-float(rank) for rank in range(num_candidates)) for _ in range(64)]
    assert len(beams.decide([(token_ids, report) for report in reports])) == 64
    hopeless = Counting([-1.0] + [-inf] * (num_candidates - 1))
    assert len(beams.decide([(token_ids, report) for report in [hopeless] * 64])) == 64
    assert start.num_read + sum(report.num_read for report in reports) + hopeless.num_read < 400
