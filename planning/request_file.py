"""Reads workloads from files: a trace of requests (JSON lines), and tenants (JSON)."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planning.arrivals import MAX_NUMBER
from planning.bounded_file import read_text
from planning.errors import PlanningError
from planning.lengths import MAX_TOKENS
from planning.request_factory import MAX_TENANTS
from planning.settings import SimulateSettings
from planning.workload import Job
from scheduler.core import TenantTerms

_TENANT_FIELDS: dict[str, type] = {
    "name": str,
    "priority": int,
    "weight": float,
    "rate": float,
    "burstiness": float,
    "daily_swing": float,
    "clients": int,
    "turnaround_s": float,
    "lengths": str,
    "prompt_tokens": int,
    "output_tokens": int,
    "system_tokens": int,
    "system_share": float,
    "system_prompts": int,
    "system_skew": float,
}
_KINDS = {str: "a string", int: "a whole number", float: "a finite number"}
_MAX_BYTES = 1 << 29
_MAX_PRIORITY = 1000
_WEIGHTS = (0.001, 1000.0)  # as in the scheduler's file of tenants, and so are the priorities


def read_jobs(path: Path) -> tuple[list[Job], bool]:
    """Reads one JSON object per line: prompt_tokens, output_tokens, optionally priority, and arrival_s.

    All lines or none have arrival_s. Returns the jobs, and whether they have times. With times, the jobs are in their
    order; without times, every job has the time 0. Raises PlanningError, which names the line.
    """
    jobs, num_timed = [], 0
    try:
        lines = read_text(path, _MAX_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanningError(f"{path}: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            arrival_s, priority = float(item.get("arrival_s", 0.0)), item.get("priority", 0)
            job = Job(arrival_s, 0, item["prompt_tokens"], item["output_tokens"], priority=priority)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise PlanningError(
                f"{path}, line {number}: expected prompt_tokens and output_tokens, not {line[:80]!r}"
            ) from error
        sizes = (job.num_prompt_tokens, job.num_output_tokens)
        if (
            any(type(size) is not int or not 1 <= size <= MAX_TOKENS for size in sizes)
            or not 0 <= job.arrival_s <= MAX_NUMBER
        ):
            raise PlanningError(
                f"{path}, line {number}: tokens must be whole numbers from 1 to {MAX_TOKENS:,}, times from 0 to "
                f"{MAX_NUMBER:g}"
            )
        if not _is_priority(job.priority):
            raise PlanningError(f"{path}, line {number}: priority must be a whole number up to ±{_MAX_PRIORITY}")
        num_timed += "arrival_s" in item
        jobs.append(job)
    if not jobs:
        raise PlanningError(f"{path}: no requests")
    if num_timed not in (0, len(jobs)):
        raise PlanningError(f"{path}: {num_timed} of {len(jobs)} requests have arrival_s: give it in all or in none")
    return sorted(jobs, key=lambda job: job.arrival_s), num_timed > 0


def read_tenants(path: Path, settings: SimulateSettings) -> list[tuple[str, TenantTerms, SimulateSettings]]:
    """Reads tenants: `[{"name": …, "weight": …, "priority": …, "rate": …}, …]`, with the workload flags as keys.

    Returns for each tenant its name, its terms, and the settings with its values in place. Raises PlanningError.
    """
    try:
        items = json.loads(read_text(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise PlanningError(f"{path}: {error}") from None
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise PlanningError(f"{path}: expected a list of objects")
    if len(items) > MAX_TENANTS:
        raise PlanningError(f"{path}: at most {MAX_TENANTS:,} tenants are simulated, not {len(items):,}")
    return [_tenant(path, index, item, settings) for index, item in enumerate(items)]


def _tenant(
    path: Path, index: int, item: Mapping[str, Any], settings: SimulateSettings
) -> tuple[str, TenantTerms, SimulateSettings]:
    place = f"{path}: tenant {item.get('name', index)!r}"
    if unknown := sorted(set(item) - set(_TENANT_FIELDS)):
        raise PlanningError(f"{place}: unknown keys: {', '.join(unknown)}")
    for key, value in item.items():
        if not _is_kind(value, _TENANT_FIELDS[key]):
            raise PlanningError(f"{place}: {key} must be {_KINDS[_TENANT_FIELDS[key]]}, not {value!r}")
    values = dict(item)
    name, priority, weight = values.pop("name", f"tenant {index}"), values.pop("priority", 0), values.pop("weight", 1.0)
    if not _is_priority(priority):
        raise PlanningError(f"{place}: priority must be a whole number up to ±{_MAX_PRIORITY}, not {priority}")
    if not _WEIGHTS[0] <= weight <= _WEIGHTS[1]:
        raise PlanningError(f"{place}: weight must be from {_WEIGHTS[0]:g} to {_WEIGHTS[1]:g}, not {weight}")
    return name, TenantTerms(weight, priority), replace(settings, tenants=None, **values)


def _is_kind(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # NaN is not
    return type(value) is kind


def _is_priority(value: Any) -> bool:
    return type(value) is int and abs(value) <= _MAX_PRIORITY
