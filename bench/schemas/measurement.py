"""Follows all instances of the schemas, and counts what is accepted."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import psutil
from llguidance import LLMatcher

from bench.schemas.following import Compiled, Followed, Follower
from bench.schemas.reasons import (
    OTHER_ORDER,
    has_reached_limit,
    refusal,
    refused_keywords,
    violated_keyword,
    why_not_accepted,
)
from bench.schemas.suite import Case, Instance, in_order_of

SLOW_S = 1.0
"""Compilations that take longer are listed by name."""

SLOW_MASK_S = 0.01
"""Schemas with a mask that takes longer are listed by name, with the time of the slowest mask."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "as json.dumps": {},
    "compact": {"separators": (",", ":")},
    "indent 2": {"indent": 2},
    "indent 4": {"indent": 4},
}
"""Ways to write a valid instance, as arguments of json.dumps. Invalid ones are written in the first way."""

_NUM_SHOWN = 40


@dataclass(slots=True)
class Totals:
    """The results so far. Times are in seconds."""

    num_schemas: int = 0
    num_refused: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    keywords: Counter[str] = field(default_factory=Counter)
    compile_times_s: list[float] = field(default_factory=list)
    slow: list[dict[str, Any]] = field(default_factory=list)
    slow_masks: list[dict[str, Any]] = field(default_factory=list)
    num_valid: Counter[str] = field(default_factory=Counter)
    num_accepted: Counter[str] = field(default_factory=Counter)
    not_accepted: list[dict[str, Any]] = field(default_factory=list)
    num_invalid: int = 0
    wrongly_accepted: list[dict[str, Any]] = field(default_factory=list)
    max_growth_bytes: int = 0


def measure(cases: Iterable[Case], follower: Follower, progress: Callable[[Totals], None]) -> Totals:
    """Compiles each schema and follows its instances."""
    totals = Totals()
    process = psutil.Process()
    for case in cases:
        before, num_masks = process.memory_info().rss, len(follower.mask_times_s)
        _measure_case(case, follower, totals)
        if (slowest_s := max(follower.mask_times_s[num_masks:], default=0.0)) > SLOW_MASK_S:
            totals.slow_masks.append({"schema": case.name, "ms": round(slowest_s * 1e3, 1)})
        totals.max_growth_bytes = max(totals.max_growth_bytes, process.memory_info().rss - before)
        progress(totals)
    return totals


def _measure_case(case: Case, follower: Follower, totals: Totals) -> None:
    compiled = follower.compile(json.dumps(case.schema, ensure_ascii=False))
    totals.num_schemas += 1
    totals.compile_times_s.append(compiled.compile_s)
    if compiled.compile_s > SLOW_S:
        totals.slow.append({"schema": case.name, "seconds": round(compiled.compile_s, 2)})
    if compiled.problem:
        totals.num_refused += 1
        totals.refusals[refusal(compiled.problem)] += 1
        totals.keywords.update(refused_keywords(compiled.problem))
        return
    _follow_instances(case, compiled, follower, totals)


def _follow_instances(case: Case, compiled: Compiled, follower: Follower, totals: Totals) -> None:
    start = follower.matcher(compiled.grammar)
    for instance in case.instances:
        outcomes = _valid(instance, follower, start) if instance.is_valid else _invalid(instance, follower, start)
        if any(map(has_reached_limit, outcomes.values())):
            start = follower.matcher(compiled.grammar)
        if instance.is_valid:
            _count_valid(case, instance, outcomes, totals, partial(follower.follow, start))
        else:
            _count_invalid(case, instance, outcomes, totals)


def _valid(instance: Instance, follower: Follower, start: LLMatcher) -> dict[str, Followed]:
    first, *others = LAYOUTS
    outcomes = {first: follower.follow_with_masks(start, _text(instance, first))}
    return outcomes | {layout: follower.follow(start, _text(instance, layout)) for layout in others}


def _invalid(instance: Instance, follower: Follower, start: LLMatcher) -> dict[str, Followed]:
    layout = next(iter(LAYOUTS))
    return {layout: follower.follow(start, _text(instance, layout))}


def _count_valid(
    case: Case, instance: Instance, outcomes: dict[str, Followed], totals: Totals, follow: Callable[[str], Followed]
) -> None:
    refused = {layout: outcome for layout, outcome in outcomes.items() if not outcome.is_accepted}
    totals.num_valid.update(outcomes.keys())
    totals.num_accepted.update(outcomes.keys() - refused.keys())
    if refused:
        layout, outcome = next(iter(refused.items()))
        in_order = replace(instance, value=in_order_of(case.schema, instance.value))
        is_other_order = not has_reached_limit(outcome) and follow(_text(in_order, layout)).is_accepted
        totals.not_accepted.append(
            {
                "schema": case.name,
                "instance": instance.index,
                "layouts": list(refused),
                "reason": OTHER_ORDER if is_other_order else why_not_accepted(outcome),
                "before": outcome.before[-_NUM_SHOWN:],
                "after": outcome.after[:_NUM_SHOWN],
            }
        )


def _count_invalid(case: Case, instance: Instance, outcomes: dict[str, Followed], totals: Totals) -> None:
    totals.num_invalid += 1
    if any(outcome.is_accepted for outcome in outcomes.values()):
        keyword = violated_keyword(case.schema, instance.value)
        totals.wrongly_accepted.append({"schema": case.name, "instance": instance.index, "keyword": keyword})


def _text(instance: Instance, layout: str) -> str:
    return json.dumps(instance.value, ensure_ascii=False, **LAYOUTS[layout])
