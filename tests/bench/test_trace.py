"""Traces: reproducible, within their bounds, and described."""

import dataclasses

import pytest

from bench.trace import TraceSettings, describe, make_trace

SETTINGS = TraceSettings(num_requests=2000, vocab_size=500, max_model_len=4096)


def test_same_settings_give_the_same_trace() -> None:
    assert make_trace(SETTINGS) == make_trace(dataclasses.replace(SETTINGS))


def test_other_seed_gives_other_lengths_and_prompts() -> None:
    one, other = make_trace(SETTINGS), make_trace(dataclasses.replace(SETTINGS, seed=8))
    assert [item.max_tokens for item in one] != [item.max_tokens for item in other]
    assert not {item.prompt_token_ids for item in one} & {item.prompt_token_ids for item in other}


def test_more_requests_continue_the_same_trace() -> None:
    few = make_trace(dataclasses.replace(SETTINGS, num_requests=10))
    assert make_trace(SETTINGS)[:10] == few


def test_lengths_are_as_documented() -> None:
    trace = make_trace(SETTINGS)
    prompts = [len(item.prompt_token_ids) for item in trace]
    outputs = [item.max_tokens for item in trace]
    assert (min(prompts), max(prompts)) == (8, 512)
    assert (min(outputs), max(outputs)) == (4, 384)
    assert sum(prompts) / len(trace) == pytest.approx(130, rel=0.1)
    assert sum(outputs) / len(trace) == pytest.approx(90, rel=0.1)


@pytest.mark.parametrize("vocab_size", [1, 2, 11, 500])
def test_ids_are_below_the_vocabulary(vocab_size: int) -> None:
    trace = make_trace(dataclasses.replace(SETTINGS, num_requests=50, vocab_size=vocab_size))
    ids = {token_id for item in trace for token_id in item.prompt_token_ids}
    assert min(ids) >= 0
    assert max(ids) < vocab_size
    assert vocab_size < 500 or min(ids) >= 10  # special tokens are not used


@pytest.mark.parametrize("max_model_len", [2, 64, 256, 895, 896, 8192])
@pytest.mark.parametrize("num_shared_tokens", [0, 20])
def test_every_request_fits_the_model(max_model_len: int, num_shared_tokens: int) -> None:
    settings = dataclasses.replace(
        SETTINGS, max_model_len=max_model_len + num_shared_tokens, num_shared_tokens=num_shared_tokens
    )
    trace = make_trace(settings)
    for item in trace:
        assert item.max_tokens >= 1
        assert len(item.prompt_token_ids) - num_shared_tokens >= 1
        assert len(item.prompt_token_ids) + item.max_tokens <= settings.max_model_len
    assert settings.scale == pytest.approx(min(1.0, max_model_len / 896))


def test_short_context_scales_all_lengths_by_one_factor() -> None:
    full, half = make_trace(SETTINGS), make_trace(dataclasses.replace(SETTINGS, max_model_len=448))
    # Prompts of other lengths consume other numbers of random draws, so only the first request is comparable.
    assert half[0].max_tokens == pytest.approx(full[0].max_tokens / 2, abs=1)
    assert len(half[0].prompt_token_ids) == pytest.approx(len(full[0].prompt_token_ids) / 2, abs=1)


def test_shared_tokens_come_first_in_every_prompt() -> None:
    trace = make_trace(dataclasses.replace(SETTINGS, num_requests=20, num_shared_tokens=30))
    assert len({item.prompt_token_ids[:30] for item in trace}) == 1
    assert len({item.prompt_token_ids[30:33] for item in trace}) == 20


def test_impossible_settings_are_an_error() -> None:
    for wrong in ({"num_requests": 0}, {"vocab_size": 0}, {"max_model_len": 1}, {"num_shared_tokens": 4095}):
        with pytest.raises(ValueError, match=r"needs|no room"):
            make_trace(dataclasses.replace(SETTINGS, **wrong))


def test_description_has_the_means_of_the_trace() -> None:
    trace = make_trace(dataclasses.replace(SETTINGS, num_requests=2))
    described = describe(SETTINGS, trace)
    assert described["seed"] == 7
    assert described["mean_output_tokens"] == round((trace[0].max_tokens + trace[1].max_tokens) / 2, 1)


def test_length_mixes_have_their_documented_means() -> None:
    for lengths, (prompt, output) in {"mixed": (130, 90), "sharegpt": (215, 197)}.items():
        drawn = make_trace(TraceSettings(num_requests=4000, vocab_size=100, max_model_len=4096, lengths=lengths))
        assert sum(len(item.prompt_token_ids) for item in drawn) / len(drawn) == pytest.approx(prompt, rel=0.05)
        assert sum(item.max_tokens for item in drawn) / len(drawn) == pytest.approx(output, rel=0.05)
