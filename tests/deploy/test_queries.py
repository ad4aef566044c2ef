"""A real Prometheus scrapes all services under load, and every query of every panel and rule returns data."""

import asyncio
import contextlib
import json
import math
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire import AsyncClient
from quire.addresses import with_port
from tests.support.deploy.observed import Observed
from tests.support.deploy.panels import RULES, panel_queries, rule_queries
from tests.support.e2e.process import Process
from tests.support.e2e.waiting import until

NUM_CLIENTS = 12

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian's package of that name)"
)


async def test_every_query_returns_data(observed: Observed, tmp_path: Path) -> None:
    address = with_port("127.0.0.1:0")
    process = Process("prometheus", command(observed, address, tmp_path))
    missing = {query.place: query.expression for query in panel_queries() + rule_queries()}
    assert len(missing) > 60
    try:
        async with (
            observed.stack.client() as client,
            aiohttp.ClientSession(f"http://{observed.stack.openai}") as http,
            load(client, http),
        ):

            async def all_return() -> bool:
                for place, expression in list(missing.items()):
                    if await asyncio.to_thread(has_data, address, expression):
                        del missing[place]
                return not missing

            with contextlib.suppress(TimeoutError):
                await until(all_return)
            exemplars = await asyncio.to_thread(stored_exemplars, address, "quire_inter_token_latency_seconds_bucket")
        assert missing == {}, process.log()
        assert exemplars, "Prometheus has stored no exemplars"
        for labels, value in exemplars:
            assert labels["request_id"].startswith(("quire-", "cmpl-"))  # of the client, of the gateway
            assert value > 0
    finally:
        process.kill()


def command(observed: Observed, address: str, directory: Path) -> list[str]:
    """Returns the command of compose.yaml, but with scrapes and evaluations every second."""
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": f"quire-{service}", "static_configs": [{"targets": [target]}]}
            for service, target in (
                ("scheduler", observed.scheduler_metrics),
                ("executor", observed.executor_metrics),
                ("gateway", observed.stack.openai),
            )
        ],
    }
    path = directory / "prometheus.yml"  # JSON is valid YAML
    path.write_text(json.dumps(settings), encoding="utf-8")
    return [
        "prometheus", f"--config.file={path}", f"--storage.tsdb.path={directory / 'data'}",
        "--enable-feature=exemplar-storage", f"--web.listen-address={address}", "--log.level=warn",
    ]  # fmt: skip


@asynccontextmanager
async def load(client: AsyncClient, http: aiohttp.ClientSession) -> AsyncIterator[None]:
    """Sends more requests than the pool can hold, so that sequences are preempted and samples copy shared blocks.

    One client more sends its requests to the gateway.
    """

    async def run_client(number: int) -> None:
        while True:
            await client.complete(f"Once upon a time there were {number} friends.", n=2, seed=number, max_tokens=120)

    async def run_http_client() -> None:
        while True:
            async with http.post("/v1/completions", json={"prompt": "Once upon a time"}) as response:
                assert response.status == 200, await response.text()

    clients = [asyncio.create_task(run_client(number)) for number in range(NUM_CLIENTS)]
    clients.append(asyncio.create_task(run_http_client()))
    try:
        yield
        assert not any(each.done() for each in clients)
    finally:
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


def stored_exemplars(address: str, selector: str) -> list[tuple[dict[str, str], float]]:
    """Returns the labels and value of each exemplar that Prometheus has stored in the last minutes."""
    period = {"start": time.time() - 600, "end": time.time() + 60}
    url = f"http://{address}/api/v1/query_exemplars?{urllib.parse.urlencode({'query': selector, **period})}"
    with urllib.request.urlopen(url, timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    return [(each["labels"], float(each["value"])) for series in answer["data"] for each in series["exemplars"]]


def has_data(address: str, expression: str) -> bool:
    """Returns true if some series has a number. Raises AssertionError if Prometheus cannot parse the expression."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        if error.code == 503:  # Prometheus is starting
            return False
        raise AssertionError(f"{expression}: {error.read().decode()}") from None
    except urllib.error.URLError:
        return False
    return any(not math.isnan(float(series["value"][1])) for series in answer["data"]["result"])
