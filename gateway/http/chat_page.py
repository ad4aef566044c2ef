"""Serves the chat page, which uses the API as any other client does.

GET /            the page
GET /page/NAME   its scripts and styles
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from gateway.api.errors import ApiError
from quire.http.static_files import StaticFile, read_files

if TYPE_CHECKING:
    from quire.http.allowed_hosts import AllowedHosts

STATIC = Path(__file__).parent / "static"
_INDEX = "index.html"
_LINK_MARK = "<!-- link to the live page -->"


UNKNOWN_HOST = "this host name is not one of --allowed-hosts"


class ChatPage:
    """Serves the files that were in the directory when it was created, and nothing else.

    live_page  URL of a scheduler's live page, to which the page has a link; None: there is no link
    """

    def __init__(self, live_page: str | None, allowed_hosts: AllowedHosts) -> None:
        self._allowed_hosts = allowed_hosts
        self._files = read_files(STATIC)
        link = "" if live_page is None else f'<a id="live-page" href="{html.escape(live_page)}">Live page</a>'
        index = self._files[_INDEX].body.decode().replace(_LINK_MARK, link)
        self._files[_INDEX] = StaticFile.of(_INDEX, index.encode())

    def add_to(self, app: web.Application) -> None:
        app.add_routes([web.get("/", self._show), web.get("/page/{name}", self._show)])

    async def _show(self, request: web.Request) -> web.Response:
        """Raises ApiError under a host name at which the API would refuse the page's requests."""
        if not self._allowed_hosts.allow(request.host):
            raise ApiError(UNKNOWN_HOST, status=403, kind="permission_error", code="permission_denied")
        file = self._files.get(request.match_info.get("name", _INDEX))
        if file is None:
            raise web.HTTPNotFound
        status, body, headers = file.answer(request.headers.get("If-None-Match"))
        return web.Response(status=status, body=body, headers=headers)
