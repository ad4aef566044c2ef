"""The schemas of JSONSchemaBench as grammars of structured output.

    git clone https://github.com/guidance-ai/jsonschemabench
    python -m bench schemas jsonschemabench/maskbench/data
    python -m bench schemas jsonschemabench/maskbench/data --every 10     # each tenth schema

Each schema is compiled as the scheduler does, and each instance is followed token by token as the executor does, with
the tokenizer of the embedded model or of --model. Valid instances are written in four layouts; with the first one,
the mask is computed and checked before each token and at the end. A valid instance that is not accepted and an invalid
one that is are listed with the reason. Times are processor time of one thread.
"""

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.command_line import Parser, at_least
from bench.machine import describe_machine
from bench.report import save
from bench.schemas.following import Follower, Vocabulary
from bench.schemas.measurement import Totals, measure
from bench.schemas.suite import read_cases
from quire.model_path import resolved_model
from scheduler.text.checkpoint import Checkpoint

_PROGRESS_S = 30.0


def summary(totals: Totals, follower: Follower) -> dict[str, Any]:
    """Returns the results as JSON values."""
    num_compiled = totals.num_schemas - totals.num_refused
    return {
        "schemas": totals.num_schemas,
        "compiled": num_compiled,
        "refused": totals.num_refused,
        "refusals": dict(totals.refusals.most_common()),
        "refused_keywords": dict(totals.keywords.most_common()),
        "valid_instances": dict(totals.num_valid),
        "valid_instances_accepted": {layout: totals.num_accepted[layout] for layout in totals.num_valid},
        "invalid_instances": totals.num_invalid,
        "invalid_instances_accepted": len(totals.wrongly_accepted),
        "compile_ms": _times_ms(totals.compile_times_s),
        "compile_slow": totals.slow,
        "mask_us": {name: round(ms * 1e3, 1) for name, ms in _times_ms(follower.mask_times_s).items()},
        "masks_slow": totals.slow_masks,
        "masks": len(follower.mask_times_s),
        "tokens_divided_in_another_way": follower.num_forced,
        "memory": {
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "largest_growth_of_a_schema_mib": totals.max_growth_bytes >> 20,
        },
        "not_accepted": totals.not_accepted,
        "wrongly_accepted": totals.wrongly_accepted,
    }


def _times_ms(times_s: Sequence[float]) -> dict[str, float]:
    if not times_s:
        return {}
    p50, p99, most = np.percentile(np.array(times_s) * 1e3, (50, 99, 100))
    return {"p50": round(float(p50), 4), "p99": round(float(p99), 4), "max": round(float(most), 4)}


def main(arguments: Sequence[str]) -> None:
    parser = Parser("schemas", __doc__)
    parser.add_argument("directory", type=Path, help="the folder maskbench/data of JSONSchemaBench")
    parser.add_argument("--model", help="directory or hub id of the model (default: the embedded one)")
    parser.add_argument("--every", type=at_least(1), default=1, help="take every n-th schema (default: 1)")
    parser.add_argument("--first", type=at_least(0), default=0, help="index of the first schema (default: 0)")
    parser.add_argument("--json", type=Path, help="file of results")
    given = parser.parse_args(arguments)
    follower = Follower(Vocabulary(Checkpoint.find(resolved_model(given.model))))
    told_s = time.monotonic()

    def progress(totals: Totals) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > _PROGRESS_S:
            told_s = time.monotonic()
            print(f"{totals.num_schemas} schemas", flush=True)

    totals = measure(read_cases(given.directory, given.every, given.first), follower, progress)
    found = summary(totals, follower)
    for name, value in found.items():
        if isinstance(value, list) and value:
            print(f"{name}:", *value, sep="\n  ")
        else:
            print(f"{name}: {value}")
    if given.json is not None:
        every = {"every": given.every, "first": given.first}
        save(given.json, {"machine": describe_machine(None)} | every | found)
