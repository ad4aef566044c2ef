"""What keeps other sites' pages away from this one, and this one from other hosts."""

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
