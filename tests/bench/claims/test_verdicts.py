"""Verdicts of each claim on data that reproduces it, reproduces it in part, and does not reproduce it."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from bench.claims import (
    batching,
    beside_transformers,
    block_sizes,
    fixed_pool,
    fragmentation,
    kv_arithmetic,
    routing,
    shared_blocks,
    simulator,
    timeline,
    waste_by_length,
)
from bench.claims.claim import Claim, Word, judged, percent
from tests.support.bench import claims_data as data

REPRODUCED, PARTLY, NOT = Word.REPRODUCED, Word.PARTLY, Word.NOT_REPRODUCED
_MOST = {"contiguous": 6, "contiguous-power-of-two": 20, "contiguous-exact": 30}
_USED = {"contiguous": 0.2, "contiguous-power-of-two": 0.3, "contiguous-exact": 0.5}

CASES: list[tuple[Claim, Callable[[], dict[str, Any]], Word, str]] = [
    (
        fragmentation.CLAIM,
        lambda: data.fragmentation({**_USED, "paged": 0.975}),
        REPRODUCED,
        "wastes 80 % (40 % internal",
    ),
    (fragmentation.CLAIM, lambda: data.fragmentation({**_USED, "paged": 0.95}), PARTLY, "stays above 4 %"),
    (
        fragmentation.CLAIM,
        lambda: data.fragmentation({**_USED, "contiguous": 0.7, "paged": 0.9}),
        NOT,
        "stays below 60 %",
    ),
    (waste_by_length.CLAIM, lambda: data.waste_by_length(15, 0.07), REPRODUCED, "from about 180 tokens"),
    (waste_by_length.CLAIM, lambda: data.waste_by_length(15, 0.2), PARTLY, "do not follow"),
    (waste_by_length.CLAIM, lambda: data.waste_by_length(16, 0.2), NOT, "more than the end of a block"),
    (
        batching.CLAIM,
        lambda: data.batching({"continuous": (20, 40), "dynamic": (15, 18), "static": (14, 16)}),
        REPRODUCED,
        "ahead at every number",
    ),
    (
        batching.CLAIM,
        lambda: data.batching({"continuous": (20, 24), "dynamic": (15, 18), "static": (14, 16)}),
        PARTLY,
        "an empty slot costs less",
    ),
    (
        batching.CLAIM,
        lambda: data.batching({"continuous": (20, 24), "dynamic": (21, 18), "static": (14, 16)}),
        NOT,
        "not ahead everywhere",
    ),
    (fixed_pool.CLAIM, lambda: data.fixed_pool({**_MOST, "paged": 48}, 20.0), REPRODUCED, "than the batch (2.00"),
    (fixed_pool.CLAIM, lambda: data.fixed_pool({**_MOST, "paged": 64}, 20.0), REPRODUCED, "there were no more clients"),
    (fixed_pool.CLAIM, lambda: data.fixed_pool({**_MOST, "paged": 12}, 20.0), PARTLY, "preempted 0 times"),
    (fixed_pool.CLAIM, lambda: data.fixed_pool({**_MOST, "paged": 12}, 9.0), NOT, "Reserving exactly makes 1.11"),
    (block_sizes.CLAIM, lambda: data.block_sizes((200, 100, 90), (30, 40, 41)), REPRODUCED, "takes 2.00"),
    (block_sizes.CLAIM, lambda: data.block_sizes((100, 100, 90), (30, 40, 41)), PARTLY, "nothing to gain"),
    (block_sizes.CLAIM, lambda: data.block_sizes((200, 100, 90), (30, 20, 41)), PARTLY, "not the best choice"),
    (
        timeline.CLAIM,
        lambda: data.timeline(
            {"static": 0.3, "dynamic": 0.3, "continuous": 0.0}, {"static": 20, "dynamic": 20, "continuous": 11}
        ),
        REPRODUCED,
        "1.82 times as many steps",
    ),
    (
        timeline.CLAIM,
        lambda: data.timeline(
            {"static": 0.3, "dynamic": 0.3, "continuous": 0.1}, {"static": 20, "dynamic": 20, "continuous": 11}
        ),
        PARTLY,
        "times as many steps",
    ),
    (shared_blocks.CLAIM, lambda: data.sharing(0.2, 0.5), REPRODUCED, "4 of 4 cases"),
    (shared_blocks.CLAIM, lambda: data.sharing(0.05, 0.1), PARTLY, "0 of 4 cases"),
    (shared_blocks.CLAIM, lambda: data.sharing(0.1, 0.05), NOT, "do not save more"),
    (beside_transformers.CLAIM, lambda: data.transformers(1.5, 10.0), REPRODUCED, "TGI was not run"),
    (beside_transformers.CLAIM, lambda: data.transformers(6.0, 10.0), PARTLY, "Less than 24 "),
    (beside_transformers.CLAIM, lambda: data.transformers(6.0, 40.0), NOT, "Less than 24 "),
    (kv_arithmetic.CLAIM, lambda: data.kv_arithmetic(40_960), REPRODUCED, "5.37 GB"),
    (kv_arithmetic.CLAIM, lambda: data.kv_arithmetic(40_000), NOT, "40,000 bytes"),
    (
        simulator.CLAIM,
        lambda: data.simulator(-0.15, 1000.0),
        REPRODUCED,
        "850 output tokens/s predicted, 1,000 measured",
    ),
    (simulator.CLAIM, lambda: data.simulator(0.16, 1000.0), PARTLY, "Worst at 4 clients"),
    (simulator.CLAIM, lambda: data.simulator(0.16, 999.0), NOT, "16.0 % off in the mean"),
    (routing.CLAIM, lambda: data.routing(0.05, 1.9, 2.0), REPRODUCED, "are below those of round robin"),
    (routing.CLAIM, lambda: data.routing(0.06, 1.9, 2.0), PARTLY, "factor of up to 2.00"),
    (routing.CLAIM, lambda: data.routing(0.05, 1.9, 2.1), PARTLY, "factor of up to 2.10"),
    (routing.CLAIM, lambda: data.routing(0.05, 1.8, 2.0), PARTLY, "are below those"),
    (routing.CLAIM, lambda: data.routing(1.0, 1.0, 2.1), NOT, "is not below round robin and least loaded"),
]


@pytest.mark.parametrize(("claim", "make", "word", "text"), CASES)
def test_verdict_has_the_expected_word_and_reason(
    claim: Claim, make: Callable[[], dict[str, Any]], word: Word, text: str
) -> None:
    verdict = claim.verdict(make())
    assert verdict.word is word
    assert text in verdict.reason
    assert verdict.ours


def test_batching_reads_medians_of_rounds() -> None:
    slow, fast = ({"continuous": (rate, rate), "dynamic": (5.0, 5.0), "static": (5.0, 5.0)} for rate in (8.0, 12.0))
    rounds = data.batching(slow)
    rounds["rows"] += data.batching(fast)["rows"] + data.batching(fast)["rows"]
    found = batching.medians(rounds)
    assert found["continuous"][32]["requests_per_s"] == 12.0
    assert found["continuous"][32]["spread"] == pytest.approx(4 / 12)
    assert found["static"][16]["spread"] == 0.0
    assert batching.CLAIM.verdict(rounds).word is REPRODUCED


def test_differing_outputs_are_reported() -> None:
    differing = data.batching({"continuous": (20, 40), "dynamic": (15, 18), "static": (14, 16)})
    assert "the same in all modes" in batching.CLAIM.verdict(differing).reason
    differing["rows"][-1]["num_equal_outputs"] -= 1
    assert "Some greedy outputs differ" in batching.CLAIM.verdict(differing).reason


def test_empty_slots_count_while_a_request_waits() -> None:
    """Two slots. Request 0 runs in steps 0-3, request 1 in 0-1; request 2 arrives at step 1 and starts in step 4."""
    spans = [[0, 0, 0, 4], [1, 1, 0, 2], [0, 2, 4, 6]]
    assert timeline.num_idle_while_waiting(spans, [0, 0, 1], 2) == 2  # slot 1 in steps 2 and 3
    assert timeline.num_idle_while_waiting(spans, [0, 0, 4], 2) == 0


def test_expected_waste_equals_the_mean_by_hand() -> None:
    """Blocks of 16 and lengths of 17 to 32: 15 to 0 unused token slots of 32, with a mean of 7.5."""
    assert waste_by_length.expected_waste(24.5, 16) == pytest.approx(7.5 / 32)
    lengths = waste_by_length.spread_lengths(16, 17)
    assert lengths == list(range(8, 25))


def test_judged_returns_the_word_and_percent_formats_a_ratio() -> None:
    assert [judged(parts) for parts in ([True, True], [True, False], [False, False])] == [REPRODUCED, PARTLY, NOT]
    assert (percent(0.0312), percent(0.5, 0)) == ("3.1 %", "50 %")
