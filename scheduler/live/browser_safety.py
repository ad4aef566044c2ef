"""What keeps other sites' pages away from this one, and this one from other hosts."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

HEADERS = {
    # Scripts, styles and connections are ours alone; nothing inline, nothing framed, nothing from elsewhere.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def is_from_elsewhere(request: web.Request) -> bool:
    """Whether a page of another origin makes this request.

    Browsers say so themselves (Fetch Metadata, https://www.w3.org/TR/fetch-metadata/, where they trust the connection,
    and Origin on every POST); what is no browser says neither, and may ask what it likes.
    """
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = request.headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc.lower() != request.host.lower()


class AllowedHosts:
    """The names under which browsers may ask for the page, and for what it shows.

    Another site can let its own name lead to this address (DNS rebinding): its pages are then of the same origin as
    this one, for all that a browser knows; only the Host header still tells the name. Addresses are nobody's to
    redirect.
    """

    def __init__(self, *names: str) -> None:
        """Those beside addresses and localhost. "*": any."""
        self._names = frozenset(name.lower() for name in names)

    def allow(self, request: web.Request) -> bool:
        header = request.headers.get("Host")
        return header is None or "*" in self._names or self._is_ours(_name(header))

    def _is_ours(self, name: str) -> bool:
        return name in self._names or name.split(".")[-1] == "localhost" or _is_address(name)


def _name(host: str) -> str:
    """Without the port, and as a name is compared."""
    name = host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.removeprefix("[").removesuffix(".").lower()


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False
