"""The cost of one request that uses every feature, in small: who is in the batch, not how long it takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench import sampling_cost
from executor.plan import SequenceParams

if TYPE_CHECKING:
    import pytest

TINY = str(Path(__file__).parents[2] / "models" / "tiny")


def test_every_feature_is_one_that_differs_from_the_default() -> None:
    featured, plain = sampling_cost.every_feature(1000, 50), SequenceParams(max_total_tokens=50)
    own = {"eos_token_ids", "num_prompt_logprobs", "num_candidates", "max_total_tokens"}  # not of a decoding sample
    for name in SequenceParams.__dataclass_fields__:
        if name not in own:
            assert repr(getattr(featured, name)) != repr(getattr(plain, name)), name


def test_batches_are_what_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever uses every feature reports; and nobody ends while time is taken."""
    reports: dict[int, set[bool]] = {0: set(), 1: set(), 2: set()}
    step = sampling_cost.Batch.step

    def watched(batch: sampling_cost.Batch) -> tuple[float, float]:
        times, slots = step(batch), batch._runner.slots
        assert not slots.counters.has_ended.any()
        reports[batch.num_featured].add(slots.wants_reports)
        return times

    monkeypatch.setattr(sampling_cost.Batch, "step", watched)
    costs = sampling_cost.measure(TINY, [0, 1, 2], num_sequences=4, num_steps=3)
    assert [cost.num_featured for cost in costs] == [0, 1, 2]
    assert reports == {0: {False}, 1: {True}, 2: {True}}
    assert all(0 < cost.sample_ms < cost.step_ms for cost in costs)
