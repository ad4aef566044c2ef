"""Counts what happened in many worlds, for a report."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.world import simulate

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.simulation.world import World


@dataclass(slots=True)
class Report:
    """The sums over some seeds. `violations` holds the problems of each seed that has some."""

    counts: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    violations: dict[int, list[str]] = field(default_factory=dict)

    def add(self, other: Report) -> None:
        self.counts += other.counts
        self.events += other.events
        self.ends += other.ends
        self.violations |= other.violations

    def count(self, seed: int, world: World) -> None:
        """Adds one world that has ended."""
        self.counts += Counter(
            seeds=1,
            virtual_s=round(world.lived_s),
            requests=len(world.clients),
            requests_with_beams=sum(client.asked.is_beam for client in world.clients),
            requests_with_logprobs=sum(client.asked.message.output.HasField("logprobs") for client in world.clients),
            requests_with_chats=sum(client.asked.message.HasField("chat") for client in world.clients),
            calls=sum(client.num_calls for client in world.clients),
            resumptions=world.num_resumptions,
            steps=world.num_steps,
            scheduler_processes=world.schedulers.num_processes,
            executor_processes=world.host.num_processes,
            adopted_blocks=world.oracles.cache.num_adopted,
            errors_raised=len(world.faults.fired),
            garbled_results=world.faults.has_garbled,
        )
        self.events.update(event.__name__ for _, event in world.events)
        self.ends.update(client.code.name for client in world.clients if client.code is not None)
        if world.oracles.violations:
            self.violations[seed] = world.oracles.violations


def report_of(seeds: Iterable[int]) -> Report:
    """Simulates the worlds of some seeds."""
    report = Report()
    for seed in seeds:
        report.count(seed, simulate(seed))
    return report


def write(path: Path, entries: dict[str, Any], report: Report | None = None) -> None:
    """Adds entries and a report to a JSON file, whose other entries stay."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= entries
    if report is not None:
        content |= {
            "counts": dict(report.counts),
            "events": dict(sorted(report.events.items())),
            "ends_of_requests": dict(sorted(report.ends.items())),
            "violations": {str(seed): problems for seed, problems in report.violations.items()},
        }
    path.write_text(json.dumps(content, indent=2) + "\n")
