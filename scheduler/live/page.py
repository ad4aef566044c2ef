"""Serves the live page over HTTP.

GET  /                   the page
GET  /live/NAME          its scripts and styles
GET  /live/prompt        {"has_chat_template": …}: whether the prompt box may send a chat
GET  /live/events        frames (`scheduler.live.frames`), as server-sent events
POST /live/completions   the prompt box (`scheduler.live.completions`)
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from quire.http.browsers import is_of_another_origin
from quire.http.static_files import HEADERS, read_files
from scheduler.core import QueueFull
from scheduler.live.completions import CompletionHandler, abort, error_response

if TYPE_CHECKING:
    from scheduler.live.feed import LiveFeed
    from scheduler.requests.intake import Intake

STATIC = Path(__file__).parent / "static"
HEARTBEAT_S = 15.0
"""Longest time without data to a viewer. After a longer silence, the connection would look dead."""
STALLED_VIEWER_S = 60.0
"""A viewer that reads nothing for this long is disconnected; its page reconnects when it can."""


class LivePage:
    """Serves the files that were in the directory when it was created, and nothing else."""

    def __init__(self, feed: LiveFeed, intake: Intake, stalled_reader_timeout_s: float = 120.0) -> None:
        self._feed = feed
        self._intake = intake
        self._completions = CompletionHandler(intake, stalled_reader_timeout_s)
        self._files = read_files(STATIC)

    def add_to(self, app: web.Application) -> None:
        app.add_routes(
            [
                web.get("/", self._show_file),
                web.get("/live/prompt", self._describe_prompt),
                web.get("/live/events", self._send_events, allow_head=False),  # a stream has no header alone
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
        status, body, headers = file.answer(request.headers.get("If-None-Match"))
        return web.Response(status=status, body=body, headers=headers)

    async def _describe_prompt(self, request: web.Request) -> web.Response:
        return web.json_response({"has_chat_template": self._intake.has_chat_template}, headers=HEADERS)

    async def _send_events(self, request: web.Request) -> web.StreamResponse:
        if is_of_another_origin(request):
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
        except ConnectionResetError:
            pass
        except TimeoutError:
            abort(request)
        return response
