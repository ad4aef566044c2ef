"""The files of a web page, as a service reads them at its start and sends them to browsers."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

HEADERS = {
    # Scripts, styles and connections only from this server; nothing inline, and no frames.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file with the headers with which it is sent."""

    body: bytes
    headers: dict[str, str]

    @classmethod
    def of(cls, name: str, body: bytes) -> "StaticFile":
        etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        content_type = _CONTENT_TYPES[Path(name).suffix]
        return cls(body, HEADERS | {"Cache-Control": "no-cache", "ETag": etag, "Content-Type": content_type})

    def answer(self, if_none_match: str | None) -> tuple[int, bytes, dict[str, str]]:
        """Returns status, body and headers for a request with this If-None-Match header."""
        if if_none_match == self.headers["ETag"]:
            return 304, b"", self.headers
        return 200, self.body, self.headers


def read_files(folder: Path) -> dict[str, StaticFile]:
    """Returns the files of a folder by name."""
    return {path.name: StaticFile.of(path.name, path.read_bytes()) for path in sorted(folder.iterdir())}
