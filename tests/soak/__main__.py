"""`python -m tests.soak --duration 2h`: load of all kinds with faults at random, against `quire serve` on loopback.

The exit status is 1 if a stream failed or differed from an undisturbed run, or if something is left at the end.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from tests.soak.faults import NAMES
from tests.soak.soak import Settings, soak

_UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float:
    """Returns a duration such as 90, 90s, 15m or 2h in seconds. Raises ValueError."""
    unit = _UNITS.get(text[-1:])
    return float(text) if unit is None else float(text[:-1]) * unit


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--duration", type=seconds, default=60.0, help="as 90, 15m or 2h (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the jobs, the clients and the faults")
    parser.add_argument("--pause", type=seconds, default=10.0, help="mean time between two faults (default: 10)")
    parser.add_argument("--clients", type=int, default=16, help="number of clients (default: 16)")
    parser.add_argument("--fault", action="append", choices=NAMES, help="let only this happen; may be repeated")
    parser.add_argument("--output", type=Path, help="also write the report to this file, as JSON")
    given = parser.parse_args(words)
    settings = Settings(given.duration, given.seed, given.fault or NAMES, given.pause, given.clients)
    report = asyncio.run(soak(settings))
    if given.output is not None:
        given.output.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    print(report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
