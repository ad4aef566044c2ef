"""Allowed tokens, bias and penalties against other implementations: alone, combined, and together in one batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.plans.plan import SequenceParams
from executor.sampling import sampler
from executor.sampling.sampler import sample
from executor.slots.logit_changes import ChangeTable
from executor.slots.sampling_table import SamplingTable
from tests.support.executor import oracle
from tests.support.executor.draws import draw, expected_probabilities
from tests.support.executor.plan_driver import PlanDriver, ints

VOCAB_SIZE, NUM_TOKENS = 307, 14


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def some_biases(seed: int, scale: float) -> dict[str, object]:
    random = np.random.default_rng(seed)
    ids = random.permutation(VOCAB_SIZE)[:60].astype(np.int32)
    return {"bias_token_ids": ids, "bias_values": (random.normal(0, scale, 60)).astype(np.float32)}


EVERY_SECOND = {"allowed_token_ids": np.arange(0, VOCAB_SIZE, 2, dtype=np.int32)}
# Few enough that each token is sampled repeatedly.
FEW = {"allowed_token_ids": np.arange(0, VOCAB_SIZE, 38, dtype=np.int32)}
CHANGES: dict[str, dict[str, object]] = {
    "allowed": EVERY_SECOND,
    "one allowed": {"allowed_token_ids": ints(123)},
    "bias": some_biases(1, 8.0),
    "a ban by bias": {
        "bias_token_ids": np.arange(0, 300, dtype=np.int32),
        "bias_values": np.full(300, -1e30, np.float32),
    },
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "frequency": {**FEW, "frequency_penalty": 1.3},
    "frequency below 0": {**FEW, "frequency_penalty": -4.0},
    "presence": {**FEW, "presence_penalty": 4.0},
    "presence below 0": {**FEW, "presence_penalty": -6.0},
    "all": {
        **EVERY_SECOND,
        **some_biases(2, 3.0),
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
    },
}


@pytest.fixture
def source(checkpoint):
    return checkpoint("llama")


@pytest.fixture(scope="module", params=["reference", "auto"])
def runner(request, checkpoint, make_runner):
    return make_runner(checkpoint("llama").directory, kernels=request.param, max_num_seqs=72, num_blocks=900)


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_alone_equals_the_oracle(name, source, runner) -> None:
    prompt, changes = source.prompt(12), CHANGES[name]
    driver = PlanDriver(runner)
    sequence = driver.admit(prompt, NUM_TOKENS, **changes)
    driver.run()
    assert sequence.output == oracle.greedy(source, prompt, NUM_TOKENS, sequence.params)
    others = replace(sequence.params, frequency_penalty=0.0, presence_penalty=0.0)
    without = others if name.startswith(("frequency", "presence")) else SequenceParams(max_total_tokens=99)
    assert sequence.output != oracle.greedy(source, prompt, NUM_TOKENS, without)


def test_all_changes_in_one_batch_equal_the_oracle(source, runner) -> None:
    """Runs them together with greedy, sampled and too short sequences, admitted one after the other."""
    driver = PlanDriver(runner)
    prompt = source.prompt(9)
    plain = source.greedy(prompt, NUM_TOKENS)
    sequences = []
    for changes in CHANGES.values():
        sequences.append(driver.admit(prompt, NUM_TOKENS, **changes))
        sequences.append(driver.admit(prompt, NUM_TOKENS))
        driver.step()
    ends = {"eos_token_ids": ints(plain[1]), "stop_token_ids": ints(plain[3])}
    sequences.append(driver.admit(prompt, NUM_TOKENS, min_total_tokens=14, **ends))
    sequences.append(driver.admit(prompt, NUM_TOKENS, min_total_tokens=14, **ends, **CHANGES["all"]))
    driver.admit(prompt, NUM_TOKENS, temperature=1.0, top_p=0.8, seed=3, **CHANGES["bias"])
    driver.admit(prompt, NUM_TOKENS, temperature=1.0, seed=4)
    driver.run()
    for sequence in sequences:
        assert sequence.output == oracle.greedy(source, prompt, NUM_TOKENS, sequence.params)


def test_penalties_survive_preemption(source, runner) -> None:
    """The sequence is admitted again with its output and with the length of its prompt."""
    prompt = source.prompt(10)
    driver = PlanDriver(runner)
    first = driver.admit(prompt, NUM_TOKENS, **CHANGES["all"])
    for _ in range(6):
        driver.step()
    driver.retire(first)
    driver.admit(source.prompt(4), 30)
    again = driver.admit(
        first.tokens,
        NUM_TOKENS - 6,
        max_chunk=4,
        **{**CHANGES["all"], "num_prompt_tokens": len(prompt)},
    )
    driver.run()
    assert again.tokens[len(prompt) :] == oracle.greedy(source, prompt, NUM_TOKENS, first.params)


def test_a_reused_slot_has_no_old_changes(source, runner) -> None:
    driver = PlanDriver(runner)
    first = driver.admit(source.prompt(6), 5, **CHANGES["all"])
    driver.run()
    second = driver.admit(source.prompt(6), 5)
    assert second.slot == first.slot
    driver.run()
    assert second.output == source.greedy(source.prompt(6), 5)


def test_forked_children_count_their_own_tokens(source, runner) -> None:
    """Children get the same tokens as separate sequences with their seeds."""
    prompt = source.prompt(8)
    params = {"temperature": 1.5, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "presence_penalty": -0.5}
    alone = []
    for seed in range(4):
        driver = PlanDriver(runner)
        sequence = driver.admit(prompt, 9, seed=seed, **params)
        driver.run()
        alone.append(sequence.output)
    driver = PlanDriver(runner)
    parent = driver.admit(prompt, 9, seed=0, **params)
    sequences = driver.fork(parent, seeds=(3, 1, 2))
    driver.run()
    assert [sequence.output for sequence in sequences] == alone
    assert len({tuple(output) for output in alone}) == 4


KINDS: list[dict[str, object]] = [
    *CHANGES.values(),
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.1},
    {"num_logprobs": 4},
    {"num_prompt_logprobs": 6},
    {"temperature": 1.0, "top_p": 0.9, "num_logprobs": 1, "min_total_tokens": 16, "eos_token_ids": ints(*range(200))},
    {"num_candidates": 6},
    {**CHANGES["all"], "temperature": 1.4, "top_k": 20, "num_logprobs": 3, "num_prompt_logprobs": 1},
]


def test_tokens_do_not_depend_on_the_batch(source, runner) -> None:
    """Compares sequences run alone with the same ones among 64 others, which start and end at other times."""
    watched = [{}, {"temperature": 1.0, "top_p": 0.9}, {**CHANGES["all"], "temperature": 1.0}, CHANGES["repetition"]]
    prompt, alone = source.prompt(7), []
    for params in watched:
        driver = PlanDriver(runner)
        sequence = driver.admit(prompt, NUM_TOKENS, seed=5, **params)
        driver.run()
        alone.append(sequence.output)
    driver = PlanDriver(runner)
    for index in range(32):
        driver.admit(source.prompt(2 + index % 5, seed=index), 3 + index % 9, seed=index, **KINDS[index % len(KINDS)])
    driver.step()
    sequences = [driver.admit(prompt, NUM_TOKENS, seed=5, **params) for params in watched]
    for index in range(32):
        driver.admit(source.prompt(1 + index % 6, seed=index), 3 + index % 9, seed=index, **KINDS[index % len(KINDS)])
    for _ in range(NUM_TOKENS):
        driver.step()
        for sequence in [sequence for sequence in driver.sequences if sequence.reason and sequence not in sequences]:
            driver.retire(sequence)
    assert [sequence.output[:NUM_TOKENS] for sequence in sequences] == alone


def random_rows(num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 3).to(dtype)


def changes_of(num_rows: int, history: list[int]) -> tuple[ChangeTable, list[SequenceParams]]:
    table, kinds = ChangeTable(num_rows, VOCAB_SIZE), [{}, *CHANGES.values()]
    params = [
        SequenceParams(max_total_tokens=99, num_prompt_tokens=4, **kinds[row % len(kinds)])  # type: ignore[arg-type]
        for row in range(num_rows)
    ]
    for row, own in enumerate(params):
        table.set(row, own, ints(*history))
    return table, params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_numbers", [1 << 23, 3 * VOCAB_SIZE, 1])
def test_changed_rows_equal_the_oracle(dtype, max_numbers) -> None:
    """Covers repeated tokens and tokens of the prompt alone, with all rows at once and in pieces."""
    history = [5, 6, 7, 5, 300, 5, 5, 9, 300, 10]
    logits = random_rows(30, dtype)
    before = logits.clone()
    table, params = changes_of(30, history)
    changes = table.of(np.arange(30, dtype=np.int32))
    seen = []
    for part in changes.parts(max_numbers):
        for row, found in zip(part.rows.tolist(), part.changed(logits), strict=True):
            expected = oracle.changed_logits(logits[row], history, params[row])
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            seen.append(row)
    assert seen == [row for row in range(30) if row % (len(CHANGES) + 1)]
    assert torch.equal(logits, before)


def test_changed_rows_do_not_affect_greedy_rows(monkeypatch) -> None:
    """Each row gets the same token as alone, and the logits are unchanged, also in pieces."""
    slots = np.arange(24, dtype=np.int32)
    logits, (table, _) = random_rows(24), changes_of(24, [1, 2, 3, 4, 1])
    before, plain = logits.clone(), sample(logits, draw(24, temperature=0.0))
    for size in (1 << 23, 2 * VOCAB_SIZE):
        monkeypatch.setattr(sampler, "_CHUNK", size)
        for temperature in (0.0, 1.0):
            mixed = draw(24, temperature=temperature)
            mixed.params.temperature[::12] = 0
            own = SamplingTable(24, VOCAB_SIZE).draw(slots, slots, table.of(slots))
            both = replace(mixed, changes=own.changes)
            token_ids = sample(logits, both)
            assert token_ids[::12].tolist() == plain[::12].tolist()
            for row in range(24):
                alone = replace(both.unchanged(ints(row)), changes=table.of(slots[[row]]))
                assert sample(logits[[row]], alone).tolist() == [token_ids[row]]
            assert torch.equal(logits, before)


def test_sampled_distribution_follows_penalties_and_bias() -> None:
    num_draws, vocab_size = 20_000, 30
    logits = np.random.default_rng(5).normal(0, 1.6, vocab_size).astype(np.float32)
    params = SequenceParams(
        max_total_tokens=99,
        num_prompt_tokens=2,
        allowed_token_ids=np.arange(3, 28, dtype=np.int32),
        bias_token_ids=ints(7, 8),
        bias_values=floats(1.5, -1.0),
        repetition_penalty=1.4,
        frequency_penalty=0.3,
        presence_penalty=0.2,
    )
    history = [9, 10, 11, 11, 9]
    changed = oracle.changed_logits(torch.from_numpy(logits), history, params).double().numpy()
    expected = expected_probabilities(changed, temperature=1.3, top_k=20, top_p=0.9)
    table = ChangeTable(1, vocab_size)
    table.set(0, params, ints(*history))
    plain = draw(num_draws, temperature=1.3, top_k=20, top_p=0.9)
    slots = np.zeros(num_draws, dtype=np.int32)
    drawn = replace(plain, changes=table.of(slots))
    token_ids = sample(torch.from_numpy(logits).repeat(num_draws, 1), drawn)
    counts, possible = np.bincount(token_ids, minlength=vocab_size), expected > 0
    assert not counts[~possible].any()
    chi_square = ((counts - num_draws * expected)[possible] ** 2 / (num_draws * expected[possible])).sum()
    degrees = possible.sum() - 1
    # Six standard deviations above the mean. The uniforms are fixed, so the outcome never varies.
    assert chi_square <= degrees + 6 * np.sqrt(2 * degrees)


def test_extreme_penalties_stay_finite() -> None:
    table = ChangeTable(1, 8)
    params = SequenceParams(max_total_tokens=9, repetition_penalty=1e-38, presence_penalty=-3e38)
    table.set(0, params, ints(1, 2))
    changes = table.of(ints(0))
    changed = changes.changed(torch.tensor([[1.0, 9.0, -9.0, 1.0, 1.0, 1.0, 1.0, 1.0]]))
    assert not changed.isnan().any()
    assert not changed.isposinf().any()
    for temperature in (0.0, 1.0, 1e-30):
        plain = draw(1, temperature=temperature)
        assert sample(torch.ones(1, 8), replace(plain, changes=changes))[0] in (1, 2)


def test_a_row_with_a_grammar_alone_is_a_changed_row_and_its_copies_are_too() -> None:
    """Its masks come later. Rows beside it get their own changes."""
    history = [5, 6, 7, 5]
    logits = random_rows(6)
    table, params = changes_of(6, history)
    with_grammar = replace(params[0], grammar="a grammar")
    for slot in (0, 3):
        table.set(slot, with_grammar, ints(*history))
    table.copy_slots(ints(3, 1), ints(5, 4))
    assert table.of(ints(0, 3, 5)).rows.tolist() == [0, 1, 2]
    assert torch.equal(table.of(ints(0, 3, 5)).changed(logits[[0, 3, 5]]), logits[[0, 3, 5]])
    changes = table.of(np.arange(6, dtype=np.int32))
    assert changes.rows.tolist() == list(range(6))
    own = [with_grammar, params[1], params[2], with_grammar, params[1], with_grammar]
    for row, found in enumerate(changes.changed(logits)):
        torch.testing.assert_close(found, oracle.changed_logits(logits[row], history, own[row]), rtol=1e-6, atol=1e-6)
    table.drop([0, 3, 5])
    assert table.of(ints(0, 3, 5)) is None
