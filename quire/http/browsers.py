"""Keeps pages of other web sites away from servers that a browser can reach.

A page can send requests to every address that its browser reaches. Browsers name the page in headers: Fetch Metadata
(https://www.w3.org/TR/fetch-metadata/) on trusted connections, and `Origin` on every POST. A site whose name is made to
stand for this machine's address (DNS rebinding) has the right origin, so a browser must also use a host name that is
known here (`quire.http.allowed_hosts`). Other programs send neither header and are not affected.
"""

from aiohttp import web


def is_sent_by_a_browser(request: web.Request) -> bool:
    """Returns whether a request has a header that only browsers send."""
    return "Origin" in request.headers or "Sec-Fetch-Site" in request.headers


def is_of_another_origin(request: web.Request) -> bool:
    """Returns whether a page of another origin sends this request, other than by a link that a person follows."""
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is not None:
        return site not in ("same-origin", "none") and not _is_visit(request)
    return origin is not None and origin.partition("://")[2].lower() != request.host.lower()


def _is_visit(request: web.Request) -> bool:
    """Returns whether a browser opens a page. The site that has the link cannot read the answer."""
    return request.method == "GET" and request.headers.get("Sec-Fetch-Dest") == "document"
