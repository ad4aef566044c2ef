"""The result of a soak."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.soak.resources import SERVICES, Sample, longest_life, slope

MAX_GROWTH = 0.2
"""Growth of a process' memory in an hour, as a share of it, if the process was observed for long enough."""
MIN_OBSERVED_S = 1800.0
"""Over a shorter time, what a process loads once would count as growth."""

MAX_NEW_DESCRIPTORS = 8
"""Descriptors that a service may hold at the end beyond those at the start, such as connections of health checks."""


@dataclass(frozen=True, slots=True)
class Report:
    """A soak: the requests, the faults, and what was found.

    requests   numbers of requests by how they were read; num_tokens: tokens received
    faults     numbers of faults by name; restarts: lines of the supervisor about a restart
    resources  by service: memory in MiB and its growth in MiB an hour, descriptors and threads at start and end
    left       running and waiting requests, active blocks and tasks of the clients at the end
    problems   what must not happen; empty if the soak passed
    """

    seed: int
    duration_s: float
    requests: dict[str, int]
    num_tokens: int
    longest_silence_s: float
    faults: dict[str, int]
    num_restarts: int
    resources: dict[str, dict[str, float]]
    left: dict[str, int]
    problems: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}, {self.duration_s:.0f} s, {self.num_tokens} tokens",
            f"requests: {_counts(self.requests)}",
            f"faults: {_counts(self.faults)}; {self.num_restarts} restarts",
            f"longest silence of a stream: {self.longest_silence_s:.1f} s",
            f"left at the end: {_counts(self.left)}",
            *(f"{service}: {_counts(row)}" for service, row in self.resources.items()),
            *(f"PROBLEM {problem}" for problem in self.problems),
            "failed" if self.problems else "passed",
        ]
        return "\n".join(lines)


def _counts(row: dict[str, Any]) -> str:
    return ", ".join(f"{value:.4g} {name}" for name, value in row.items())


def resources(
    before: Sequence[Sample], samples: Sequence[Sample], after: Sequence[Sample]
) -> dict[str, dict[str, float]]:
    """Returns what each service held at the start and at the end, and how its memory grew."""
    rows = {}
    for service in SERVICES:
        (first,), (last,) = ([each for each in some if each.service == service] for some in (before, after))
        life = longest_life(samples, service)
        rows[service] = {
            "MiB at the start": first.rss / 2**20,
            "MiB at the end": last.rss / 2**20,
            "descriptors at the start": first.num_descriptors,
            "descriptors at the end": last.num_descriptors,
            "threads at the start": first.num_threads,
            "threads at the end": last.num_threads,
        }
        if life and life[-1].time_s - life[0].time_s >= MIN_OBSERVED_S:
            rows[service]["MiB an hour"] = slope(life) * 3600 / 2**20
    return rows


def tracebacks(log: str) -> list[str]:
    """Returns a line for each exception that a service has logged: also those that it survived."""
    lines = log.splitlines()
    starts = [number for number, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    return [f"an exception: {lines[max(0, number - 1)]}" for number in starts]


def leaks(rows: dict[str, dict[str, float]]) -> list[str]:
    """Returns a line for each service whose memory grows, or that holds more descriptors than at the start."""
    lines = []
    for service, row in rows.items():
        if row["descriptors at the end"] > row["descriptors at the start"] + MAX_NEW_DESCRIPTORS:
            lines.append(f"{service}: more descriptors at the end than at the start")
        if row.get("MiB an hour", 0.0) > MAX_GROWTH * row["MiB at the end"]:
            lines.append(f"{service}: memory grows by {row['MiB an hour']:.0f} MiB an hour")
    return lines
