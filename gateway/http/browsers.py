"""Keeps pages of other web sites away from a gateway that a browser can reach.

A page can send requests to every address that its browser reaches. Pages of other origins are recognised by the header
`Origin`. A site whose name is made to stand for this machine's address (DNS rebinding) has the right origin, so a
browser must also use a host name that is known here. Other programs send neither header and are not affected.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Collection

    from aiohttp import web

UNKNOWN_HOST = "this host name is not one of --allowed-hosts"


def refused_page(request: web.Request, allowed_hosts: Collection[str]) -> str | None:
    """Returns why a request of a browser is refused; None if it is not, or if no browser has sent it."""
    origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site")
    if origin is None and site is None:
        return None
    is_of_other_origin = origin is not None and origin.partition("://")[2] != request.host
    if is_of_other_origin or (site == "cross-site" and not _is_visit(request)):
        return "a page of another origin may not use this API"
    return None if is_allowed_host(request.host, allowed_hosts) else UNKNOWN_HOST


def is_allowed_host(host: str, allowed_hosts: Collection[str]) -> bool:
    """Returns whether browsers may use this name, which can have a port."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and (
        name == "localhost" or name in allowed_hosts or "*" in allowed_hosts or _is_address(name)
    )


def _is_visit(request: web.Request) -> bool:
    """Returns whether a person follows a link to this server. The other site cannot read the answer."""
    return request.method == "GET" and request.headers.get("Sec-Fetch-Dest") == "document"


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
