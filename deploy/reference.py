"""Writes the tables of docs/operations.md: flags from the configurations, metrics from the running services.

Run `make dashboards` or `python -m deploy.reference`, which starts both services on free ports for a moment.
"""

import asyncio
import re
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import quire
from bench.server_process import quire_server
from executor.config import ExecutorConfig
from gateway.config import GatewayConfig
from quire.options import flag_texts
from scheduler.config import SchedulerConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
_TABLE = re.compile(r"(<!-- table: (?P<name>[a-z ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Returns the page with each table replaced by the one in `tables`. Raises KeyError for an unknown table."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{tables[match['name']]}\n{match[3]}", page)


def flag_tables() -> dict[str, str]:
    """Returns the tables of the flags of all services."""
    return {
        "scheduler flags": _flag_table(SchedulerConfig),
        "executor flags": _flag_table(ExecutorConfig),
        "gateway flags": _flag_table(GatewayConfig),
    }


def metric_tables(scheduler_page: str, executor_page: str) -> dict[str, str]:
    """Returns the tables of metrics, from the pages that Prometheus scrapes.

    The services must have served one request and refused another, so that all metrics have series.
    """
    return {"scheduler metrics": _metric_table(scheduler_page), "executor metrics": _metric_table(executor_page)}


def metric_names(page: str) -> set[str]:
    """Returns every name that a query can use; a histogram has three."""
    return {name for family in _families(page) for name in family.series}


def _flag_table(config: type[Any]) -> str:
    texts = flag_texts(config)
    rows = ((f"`--{field.name.replace('_', '-')}`", _default(field), texts[field.name]) for field in fields(config))
    return _table(("flag", "default", "what it is"), rows)


def _default(field: Field[Any]) -> str:
    """Returns the default; nothing where the text says what the commands take if the flag is not given."""
    return "" if field.default in (MISSING, None, "") else f"`{field.default}`"


class _Family:
    """A metric with its description on the page and the names of its series."""

    def __init__(self, name: str, kind: str, text: str, labels: set[str]) -> None:
        self.name, self.kind, self.text, self.labels = name, kind, text, labels

    @property
    def series(self) -> set[str]:
        if self.kind == "histogram":
            return {f"{self.name}_{part}" for part in ("bucket", "count", "sum")}
        return {self.name}


def _families(page: str) -> list[_Family]:
    """Returns Quire's metrics, without the `_created` series that the client library adds."""
    return [
        _Family(
            f"{family.name}_total" if family.type == "counter" else family.name,
            family.type,
            family.documentation,
            {label for sample in family.samples for label in sample.labels} - {"le"},
        )
        for family in text_string_to_metric_families(page)
        if family.name.startswith("quire_") and not family.name.endswith("_created")
    ]


def _metric_table(page: str) -> str:
    rows = (
        (f"`{family.name}`", family.kind, ", ".join(f"`{label}`" for label in sorted(family.labels)), family.text)
        for family in sorted(_families(page), key=lambda family: family.name)
    )
    return _table(("metric", "type", "labels", "what it is"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


async def _pages() -> tuple[str, str]:
    """Starts both services of this checkout and returns the pages that Prometheus scrapes."""
    async with quire_server(["--num-blocks", "64"]) as server:
        async with quire.AsyncClient(server.addresses["grpc"]) as client:
            await client.complete("Once upon a time", max_tokens=2)
            try:
                await client.complete("Once upon a time", max_tokens=2, temperature=-1.0)
            except quire.InvalidRequestError:
                pass
            else:
                raise RuntimeError("a temperature below zero was accepted")
        return (
            await asyncio.to_thread(fetched, server.addresses["http"]),
            await asyncio.to_thread(fetched, server.addresses["metrics"]),
        )


def fetched(address: str) -> str:
    """Returns the metrics of a service in the text format."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
        return str(response.read().decode())


def write() -> None:
    """Writes the tables into docs/operations.md."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(page, flag_tables() | metric_tables(*asyncio.run(_pages()))), encoding="utf-8")


if __name__ == "__main__":
    write()
