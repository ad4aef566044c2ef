"""Serves the live page over HTTP.

GET  /                   the page
GET  /live/NAME          its scripts and styles
GET  /live/prompt        {"has_chat_template": …}: whether the prompt box may send a chat
GET  /live/events        frames (`scheduler.live.frames`), as server-sent events
POST /live/completions   the prompt box (`scheduler.live.completions`)
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from scheduler.core import QueueFull
from scheduler.live.browser_safety import HEADERS, is_cross_origin
from scheduler.live.completions import CompletionHandler, error_response

if TYPE_CHECKING:
    from scheduler.live.feed import LiveFeed
    from scheduler.requests.intake import Intake

STATIC = Path(__file__).parent / "static"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEARTBEAT_S = 15.0
"""Longest time without data to a viewer. After a longer silence, the connection would look dead."""
STALLED_VIEWER_S = 60.0
"""A viewer that reads nothing for this long is disconnected; its page reconnects when it can."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    content_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> StaticFile:
        body = path.read_bytes()
        return cls(body, CONTENT_TYPES[path.suffix], f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')


class LivePage:
    """Serves the files that were in the directory when it was created, and nothing else."""

    def __init__(self, feed: LiveFeed, intake: Intake, stalled_reader_timeout_s: float = 120.0) -> None:
        self._feed = feed
        self._intake = intake
        self._completions = CompletionHandler(intake, stalled_reader_timeout_s)
        self._files = {path.name: StaticFile.read(path) for path in sorted(STATIC.iterdir())}

    def add_to(self, app: web.Application) -> None:
        app.add_routes(
            [
                web.get("/", self._show_file),
                web.get("/live/prompt", self._describe_prompt),
                web.get("/live/events", self._send_events),
                web.post("/live/completions", self._completions.generate),
                web.get("/live/{name}", self._show_file),
            ]
        )
        app.on_shutdown.append(self._close)

    async def _close(self, app: web.Application) -> None:
        self._feed.close()

    async def _show_file(self, request: web.Request) -> web.Response:
        file = self._files.get(request.match_info.get("name", "index.html"))
        if file is None:
            raise web.HTTPNotFound(headers=HEADERS)
        headers = HEADERS | {"Cache-Control": "no-cache", "ETag": file.etag}
        if request.headers.get("If-None-Match") == file.etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, headers=headers | {"Content-Type": file.content_type})

    async def _describe_prompt(self, request: web.Request) -> web.Response:
        return web.json_response({"has_chat_template": self._intake.has_chat_template}, headers=HEADERS)

    async def _send_events(self, request: web.Request) -> web.StreamResponse:
        if is_cross_origin(request):
            raise web.HTTPForbidden(headers=HEADERS, text="a page of another origin may not watch\n")
        try:
            with self._feed.viewer() as viewer:
                response = web.StreamResponse(
                    headers=HEADERS | {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
                )
                await response.prepare(request)
                while (event := await viewer.next_event(HEARTBEAT_S)) is not None:
                    # The write waits when the connection's buffer is full; the feed keeps only a few frames meanwhile.
                    async with asyncio.timeout(STALLED_VIEWER_S):
                        await response.write(event)
        except QueueFull as error:
            return error_response(error)
        except (ConnectionResetError, TimeoutError):
            pass
        return response
