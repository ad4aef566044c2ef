"""Runs the simulation over a range of seeds, shows the log of one seed, or searches for faults that are put back."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.simulation.put_back_streams import FAULTS
from tests.simulation.report import Report, report_of, write
from tests.simulation.world import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_SEEDS = 10_000
"""Seeds within which a fault that is put back must be found."""

CHUNK = 100
PROGRESS = 1_000
"""Seeds after which the numbers so far are shown and written."""


def find(fault: Callable[[pytest.MonkeyPatch], None], seeds: Iterable[int]) -> tuple[int, str]:
    """Returns the first seed that finds a fault, and its violation. Raises LookupError if none does."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        for seed in seeds:
            if found := simulate(seed).oracles.violations:
                return seed, found[0]
    raise LookupError(f"{fault.__name__} is not found in {seeds}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0..999", help="first..last")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--log", type=int, help="the seed whose log is shown")
    parser.add_argument("--put-back", help=f"all, or one of {', '.join(fault.__name__ for fault in FAULTS)}")
    parser.add_argument("--report", type=Path, help="a JSON file to which the numbers are added")
    arguments = parser.parse_args()
    if arguments.log is not None:
        print("\n".join(simulate(arguments.log).lines))
        return 0
    if arguments.put_back is not None:
        return _find(arguments.put_back, arguments.report)
    first, last = (int(part) for part in arguments.seeds.split(".."))
    return _search(first, last, arguments.jobs, arguments.report)


def _find(name: str, path: Path | None) -> int:
    found: dict[str, int | None] = {}
    for fault in FAULTS:
        if name not in ("all", fault.__name__):
            continue
        try:
            found[fault.__name__], problem = find(fault, range(MAX_SEEDS))
            print(f"seed {found[fault.__name__]:4} finds {fault.__name__}: {problem[:120]}", flush=True)
        except LookupError as error:
            found[fault.__name__] = None
            print(error, flush=True)
    if path is not None:
        write(path, {"first_seed_that_finds": found})
    return 1 if None in found.values() else 0


def _search(first: int, last: int, num_jobs: int, path: Path | None) -> int:
    chunks = [range(start, min(start + CHUNK, last + 1)) for start in range(first, last + 1, CHUNK)]
    began_s, total = time.monotonic(), Report()
    with ProcessPoolExecutor(num_jobs) as pool:
        for chunk, report in zip(chunks, pool.map(report_of, chunks), strict=True):
            total.add(report)
            for seed, problems in report.violations.items():
                print(f"seed {seed}: {'; '.join(problems)}", flush=True)
            if total.counts["seeds"] % PROGRESS == 0 or chunk is chunks[-1]:
                duration_s = time.monotonic() - began_s
                number, rate = total.counts["seeds"], 60 * total.counts["seeds"] / duration_s
                wrong = len(total.violations)
                print(f"{number} seeds, {wrong} with violations, {duration_s:.0f} s, {rate:.0f} a minute", flush=True)
                if path is not None:
                    write(path, {"seeds": f"{first}..{chunk[-1]}", "duration_s": round(duration_s)}, total)
    return 1 if total.violations else 0


if __name__ == "__main__":
    sys.exit(main())
