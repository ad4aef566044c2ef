"""Reads workloads from files: a trace of requests (JSON lines), and tenants (JSON)."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planning.errors import PlanningError
from planning.settings import SimulateSettings
from planning.workload import Job

_TENANT_FIELDS = {
    "rate",
    "burstiness",
    "daily_swing",
    "clients",
    "turnaround_s",
    "lengths",
    "prompt_tokens",
    "output_tokens",
    "system_tokens",
    "system_share",
    "system_prompts",
    "system_skew",
}


def read_jobs(path: Path) -> list[Job]:
    """Reads one JSON object per line with prompt_tokens, output_tokens and, in all lines or in none, arrival_s.

    Returns the jobs ordered by their times; without times every job has the time 0. Raises PlanningError, which names
    the line.
    """
    jobs, num_timed = [], 0
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanningError(f"{path}: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            job = Job(float(item.get("arrival_s", 0.0)), 0, item["prompt_tokens"], item["output_tokens"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanningError(
                f"{path}, line {number}: expected prompt_tokens and output_tokens, not {line[:80]!r}"
            ) from error
        sizes = (job.num_prompt_tokens, job.num_output_tokens)
        if any(type(size) is not int or size < 1 for size in sizes) or not 0 <= job.arrival_s < math.inf:
            raise PlanningError(
                f"{path}, line {number}: tokens must be whole numbers of at least 1, times must not be negative"
            )
        num_timed += "arrival_s" in item
        jobs.append(job)
    if not jobs:
        raise PlanningError(f"{path}: no requests")
    if num_timed not in (0, len(jobs)):
        raise PlanningError(f"{path}: {num_timed} of {len(jobs)} requests have arrival_s: give it in all or in none")
    return sorted(jobs, key=lambda job: job.arrival_s)


def read_tenants(path: Path, settings: SimulateSettings) -> list[tuple[str, int, SimulateSettings]]:
    """Reads tenants: `[{"name": …, "priority": …, "rate": …, "lengths": …}, …]`, with the workload flags as keys.

    Returns for each tenant its name, its priority, and the settings with its values in place. Raises PlanningError.
    """
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanningError(f"{path}: {error}") from None
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise PlanningError(f"{path}: expected a list of objects")
    return [_tenant(path, index, item, settings) for index, item in enumerate(items)]


def _tenant(
    path: Path, index: int, item: Mapping[str, Any], settings: SimulateSettings
) -> tuple[str, int, SimulateSettings]:
    values = dict(item)
    name, priority = values.pop("name", f"tenant {index}"), values.pop("priority", 0)
    unknown = sorted(set(values) - _TENANT_FIELDS)
    if unknown:
        raise PlanningError(f"{path}: tenant {name!r}: unknown keys: {', '.join(unknown)}")
    for key, value in values.items():
        wanted = str if key == "lengths" else int | float
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise PlanningError(f"{path}: tenant {name!r}: {key}: {value!r} has the wrong type")
    if not isinstance(name, str) or type(priority) is not int:
        raise PlanningError(f"{path}: tenant {index}: name must be a string, priority a whole number")
    return name, priority, replace(settings, tenants=None, **values)
