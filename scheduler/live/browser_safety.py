"""Keeps pages of other sites away from the live page."""

from urllib.parse import urlsplit

from aiohttp import web


def is_cross_origin(request: web.Request) -> bool:
    """Returns whether a page of another origin makes this request.

    Browsers report this in headers: Fetch Metadata (https://www.w3.org/TR/fetch-metadata/) on trusted connections, and
    Origin on every POST. Other clients send neither, and are not restricted.
    """
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = request.headers.get("Origin")
    try:
        return origin is not None and urlsplit(origin).netloc.lower() != request.host.lower()
    except ValueError:  # it is no origin
        return True
