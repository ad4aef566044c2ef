"""A scheduler with its live page, and helpers that read its HTTP responses."""

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from quire.http.static_files import HEADERS
from scheduler.engine.engine import Engine
from scheduler.live.feed import LiveFeed
from scheduler.live.plan_log import PlanLog
from scheduler.requests.intake import Intake
from scheduler.servers.http_server import HttpServer
from tests.support.scheduler.fake_client import FakeClient


@dataclass
class Served:
    """A scheduler without its gRPC server. `feed` sends frames as often as it can."""

    client: FakeClient
    engine: Engine
    intake: Intake
    plans: PlanLog
    feed: LiveFeed
    http: HttpServer

    @property
    def url(self) -> str:
        return f"http://{self.http.address}"


def body(text: Any = "once upon a time", max_tokens: int = 20, **fields: Any) -> dict[str, Any]:
    return {"text": text, "stopping": {"max_tokens": max_tokens, "ignore_eos": True}} | fields


async def read_messages(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    return [json.loads(line) async for line in response.content]


def has_safe_headers(response: aiohttp.ClientResponse) -> bool:
    return all(response.headers.get(name) == value for name, value in HEADERS.items())


def connections(served: Served) -> list[Any]:
    """Returns the open connections of the server."""
    server = served.http._runner.server
    assert server is not None
    return list(server.connections)
