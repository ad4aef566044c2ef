"""Runs the simulation over a range of seeds, shows the log of one seed, or searches for faults that are put back."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.simulation.put_back import FAULTS
from tests.simulation.world import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_SEEDS = 10_000
"""Seeds within which a fault that is put back must be found."""

CHUNK = 100


def violations(seeds: Iterable[int]) -> dict[int, list[str]]:
    """Returns the violations of each seed that has some."""
    return {seed: found for seed in seeds if (found := simulate(seed).oracles.violations)}


def seeds_to_find(fault: Callable[[pytest.MonkeyPatch], None], max_seeds: int = MAX_SEEDS) -> tuple[int, str]:
    """Returns how many seeds find a fault, and the first violation. Raises LookupError if `max_seeds` do not."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        for seed in range(max_seeds):
            if found := simulate(seed).oracles.violations:
                return seed + 1, found[0]
    raise LookupError(f"{fault.__name__} is not found in {max_seeds} seeds")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0..999", help="first..last")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--log", type=int, help="the seed whose log is shown")
    parser.add_argument("--put-back", help=f"all, or one of {', '.join(fault.__name__ for fault in FAULTS)}")
    arguments = parser.parse_args()
    if arguments.log is not None:
        print("\n".join(simulate(arguments.log).lines))
        return 0
    if arguments.put_back is not None:
        for fault in FAULTS:
            if arguments.put_back in ("all", fault.__name__):
                number, problem = seeds_to_find(fault)
                print(f"{number:6} seeds  {fault.__name__}: {problem[:120]}", flush=True)
        return 0
    first, last = (int(part) for part in arguments.seeds.split(".."))
    return _search(first, last, arguments.jobs)


def _search(first: int, last: int, num_jobs: int) -> int:
    chunks = [range(start, min(start + CHUNK, last + 1)) for start in range(first, last + 1, CHUNK)]
    began_s, number, num_violations = time.monotonic(), 0, 0
    with ProcessPoolExecutor(num_jobs) as pool:
        for chunk, found in zip(chunks, pool.map(violations, chunks), strict=True):
            number += len(chunk)
            for seed, problems in found.items():
                print(f"seed {seed}: {'; '.join(problems)}", flush=True)
                num_violations += 1
    duration_s = time.monotonic() - began_s
    rate = 60 * number / duration_s
    print(f"{number} seeds, {num_violations} with violations, {duration_s:.0f} s, {rate:.0f} a minute")
    return 1 if num_violations else 0


if __name__ == "__main__":
    sys.exit(main())
