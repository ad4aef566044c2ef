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


def in_order_of(schema: Any, value: Any) -> Any:
    """Returns a value whose objects have their properties in the order of the schema.

    The schema of an object is taken to be the one that names most of its properties.
    """
    orders = list(_orders(schema))

    def ordered(value: Any) -> Any:
        if isinstance(value, list):
            return [ordered(each) for each in value]
        if not isinstance(value, dict):
            return value
        best = max(orders, key=lambda names: sum(name in value for name in names), default=[])
        names = [name for name in best if name in value]
        return {name: ordered(value[name]) for name in [*names, *(value.keys() - set(names))]}

    return ordered(value)


def _orders(schema: Any) -> Iterator[list[str]]:
    """Yields the names of the properties of each object in the schema, in their order."""
    children = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        yield list(schema["properties"])
    for each in children:
        yield from _orders(each)


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
