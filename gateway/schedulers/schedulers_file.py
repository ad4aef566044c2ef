"""A file with the addresses of the schedulers, one on each line, which may change while the gateway runs."""

from __future__ import annotations

from functools import partial

from quire.addresses import is_address
from quire.watched_files import WatchedFiles

MAX_BYTES = 2**20
"""Bound of the size of the file. A thousand addresses have about 30 KB."""


class SchedulersFile:
    """Reads the file again when it has changed. A file that cannot be used changes nothing, and is logged."""

    def __init__(self, path: str) -> None:
        """Raises ValueError if the file cannot be used."""
        self._file = WatchedFiles([path], partial(read_addresses, path))

    @property
    def addresses(self) -> list[str]:
        """The addresses in the file as it is, or if it cannot be used, those before."""
        return list(self._file.get())


def read_addresses(path: str) -> tuple[str, ...]:
    """Reads the addresses. Empty lines, and what follows a #, are skipped.

    Raises ValueError if the file cannot be read, has a line that is no address or is there twice, or has no address:
    an empty file is more likely to be half written than meant.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"{path}: is larger than {MAX_BYTES} bytes")
        text = data.decode()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not text in UTF-8") from None
    addresses = []
    for number, line in enumerate(text.splitlines(), 1):
        address = line.partition("#")[0].strip()
        if not address:
            continue
        if address in addresses:
            raise ValueError(f"{path}, line {number}: {address} is there twice")
        if not is_address(address):
            raise ValueError(f"{path}, line {number}: expected host:port or unix:path, found {address!r}")
        addresses.append(address)
    if not addresses:
        raise ValueError(f"{path}: names no scheduler")
    return tuple(addresses)
