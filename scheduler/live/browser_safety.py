"""Keeps pages of other sites away from the live page, and the live page away from other hosts."""

from ipaddress import ip_address
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


class AllowedHosts:
    """The host names under which browsers may request the page and its data.

    Another site can point its own name at this address (DNS rebinding). A browser then treats its pages as pages of
    this origin, and only the Host header still has the other name. Requests by IP address cannot be redirected this
    way.
    """

    def __init__(self, *names: str) -> None:
        """Allows these names in addition to addresses and localhost; "*" allows any name."""
        self._names = frozenset(name.lower() for name in names)

    def allow(self, request: web.Request) -> bool:
        header = request.headers.get("Host")
        return header is None or "*" in self._names or self._is_allowed(_name(header))

    def _is_allowed(self, name: str) -> bool:
        return name in self._names or name.split(".")[-1] == "localhost" or _is_address(name)


def _name(host: str) -> str:
    """Returns the name without the port, in the form in which names are compared."""
    name = host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.removeprefix("[").removesuffix(".").lower()


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False
