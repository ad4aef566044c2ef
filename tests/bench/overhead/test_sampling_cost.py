"""The batches of the sampling measurement on a small scale; no times are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.overhead import sampling_cost
from executor.plans.plan import SequenceParams
from quire.model_path import embedded_model

if TYPE_CHECKING:
    import pytest

TINY = embedded_model()


def test_every_feature_differs_from_the_default() -> None:
    featured, plain = sampling_cost.every_feature(1000, 50), SequenceParams(max_total_tokens=50)
    excluded = {"eos_token_ids", "num_prompt_logprobs", "num_candidates", "max_total_tokens"}  # not used in a decode
    excluded |= {"grammar"}  # `bench structured-cost` measures it
    for name in SequenceParams.__dataclass_fields__:
        if name not in excluded:
            assert repr(getattr(featured, name)) != repr(getattr(plain, name)), name


def test_batches_have_the_kinds_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with every feature report, those with a temperature draw, and none ends during the measurement."""
    wanted = [("every feature", 0), ("temperature, top-p", 4), ("every feature", 2)]
    seen: dict[tuple[str, int], set[tuple[bool, int, int]]] = {which: set() for which in wanted}
    step = sampling_cost.Batch.step

    def watched(batch: sampling_cost.Batch) -> tuple[float, float]:
        times, slots = step(batch), batch._runner.slots
        assert not slots.counters.has_ended.any()
        draw = slots.draw(np.arange(4, dtype=np.int32))
        num_drawn, num_cut = int((draw.params.temperature > 0).sum()), int((draw.params.top_p < 1).sum())
        seen[batch.kind, batch.num_sampled].add((slots.is_synchronous, num_drawn, num_cut))
        return times

    monkeypatch.setattr(sampling_cost.Batch, "step", watched)
    costs = sampling_cost.measure(TINY, wanted, num_sequences=4, num_steps=3)
    assert [(cost.kind, cost.num_sequences) for cost in costs] == wanted
    assert list(seen.values()) == [{(False, 0, 0)}, {(False, 4, 4)}, {(True, 2, 2)}]
    assert all(0 < cost.sample_ms < cost.step_ms for cost in costs)
