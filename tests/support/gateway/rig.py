"""A gateway in this process, in front of fake schedulers or other addresses."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from gateway.config import GatewayConfig
from gateway.http.server import GatewayServer
from gateway.schedulers.schedulers import Schedulers
from tests.support.gateway.fake_scheduler import MODEL, FakeScheduler

if TYPE_CHECKING:
    from types import TracebackType

    from gateway.schedulers.schedulers import PromptReader

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


class Rig:
    """Starts `num_fakes` fake schedulers, the gateway, and an HTTP client. An async context manager.

    can_change  schedulers join and leave
    config      further settings of the gateway; `scheduler` replaces the fakes
    """

    def __init__(
        self,
        num_fakes: int = 1,
        *,
        key: str | None = None,
        own_key: str | None = None,
        prompts: PromptReader | None = None,
        can_change: bool = False,
        **config: Any,
    ) -> None:
        self._prompts = prompts
        self.fakes = [FakeScheduler(key) for _ in range(0 if "scheduler" in config else num_fakes)]
        self._config = {"listen": "127.0.0.1:0"} | config
        self._own_key = own_key
        self._can_change = can_change
        self._stack = AsyncExitStack()

    @property
    def fake(self) -> FakeScheduler:
        return self.fakes[0]

    async def __aenter__(self) -> Self:
        for fake in self.fakes:
            await fake.start()
            self._stack.push_async_callback(fake.stop)
        if self.fakes:
            self._config["scheduler"] = ",".join(fake.address for fake in self.fakes)
        config = GatewayConfig(**self._config)
        self.config = config
        self.schedulers = Schedulers(
            config.connections(self._own_key),
            config.resume_timeout_s,
            config.routing,
            config.max_waiting,
            config.max_wait_s,
            self._prompts,
            can_change=self._can_change,
        )
        self._stack.push_async_callback(self.schedulers.close)
        await self.schedulers.start()
        self.server = GatewayServer(self.schedulers, config)
        await self.server.start()
        self._stack.push_async_callback(self.server.stop)
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession(f"http://{self.server.address}"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Returns the status and the JSON of the answer."""
        async with self.http.post(path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.http.get(path, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", CHAT | fields)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt} | fields)

    async def events(self, path: str, body: Any, **headers: str) -> list[Any]:
        """Returns the data of all events of a streamed answer; "[DONE]" as it is."""
        async with asyncio.timeout(30):
            async with self.http.post(path, json=body | {"stream": True}, headers=headers) as response:
                assert response.status == 200, await response.text()
                assert response.content_type == "text/event-stream"
                return parsed_events(await response.text())


def parsed_events(text: str) -> list[Any]:
    """Returns the data of the events of a stream."""
    assert text.endswith("\n\n") or not text
    found = []
    for event in text.split("\n\n")[:-1]:
        assert event.startswith("data: "), event
        data = event.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def content(events: list[Any], index: int = 0) -> str:
    """Returns the text of one choice of a chat's or a completion's events."""
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", ())]
    mine = [choice for choice in choices if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in mine)
