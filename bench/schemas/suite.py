"""Reads the schemas of JSONSchemaBench with their instances, from its folder maskbench/data."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bench.command_line import BenchError


@dataclass(frozen=True, slots=True)
class Instance:
    """A JSON value, and whether it is valid. `index` counts the instances of its schema."""

    index: int
    is_valid: bool
    value: Any


@dataclass(frozen=True, slots=True)
class Case:
    """A schema with its instances. `name` is the name of its file without ".json"."""

    name: str
    schema: Any
    instances: tuple[Instance, ...]


def read_cases(directory: Path, every: int = 1, first: int = 0) -> Iterator[Case]:
    """Yields every n-th schema by name, from the one at `first`. Raises BenchError."""
    paths = sorted(directory.glob("*.json"))
    if not paths:
        raise BenchError(f"{directory}: no schemas; expected the folder maskbench/data of JSONSchemaBench")
    for path in islice(paths, first, None, every):
        yield _read(path)


def _read(path: Path) -> Case:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        tests = [(bool(each["valid"]), each["data"]) for each in found.get("tests", ())]
        instances = tuple(Instance(i, *each) for i, each in enumerate(tests))
        return Case(path.stem, found["schema"], instances)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{path}: not a schema of JSONSchemaBench: {error!r}") from error
