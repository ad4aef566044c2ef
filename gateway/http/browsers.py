"""Keeps pages of other web sites away from a gateway that a browser can reach.

A page can send requests to every address that its browser reaches. Pages of other origins are recognised by the header
`Origin`. A site whose name is made to stand for this machine's address (DNS rebinding) has the right origin, so a
browser must also use a host name that is known here. Other programs send neither header and are not affected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

    from quire.allowed_hosts import AllowedHosts

UNKNOWN_HOST = "this host name is not one of --allowed-hosts"


def refused_page(request: web.Request, allowed_hosts: AllowedHosts) -> str | None:
    """Returns why a request of a browser is refused; None if it is not, or if no browser has sent it."""
    origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site")
    if origin is None and site is None:
        return None
    is_of_other_origin = origin is not None and origin.partition("://")[2].lower() != request.host.lower()
    if is_of_other_origin or (site == "cross-site" and not _is_visit(request)):
        return "a page of another origin may not use this API"
    return None if allowed_hosts.allow(request.host) else UNKNOWN_HOST


def _is_visit(request: web.Request) -> bool:
    """Returns whether a person follows a link to this server. The other site cannot read the answer."""
    return request.method == "GET" and request.headers.get("Sec-Fetch-Dest") == "document"
