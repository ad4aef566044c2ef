"""The host names under which browsers may use an HTTP server.

Another site can point its own name at this server's address (DNS rebinding). A browser then treats its pages as pages
of this origin, and only the header `Host` still has the other name. Requests by IP address cannot be redirected so.
"""

from ipaddress import ip_address


class AllowedHosts:
    """Some names, addresses and localhost. Upper case, a final dot and a port make no difference."""

    def __init__(self, *names: str) -> None:
        """Allows these names in addition to addresses and localhost; "*" allows any name."""
        self._names = frozenset(map(_normal, names))

    def allow(self, host: str) -> bool:
        """Returns whether the header `Host` has an allowed name."""
        name = _normal(host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0])
        return "*" in self._names or name in self._names or name.split(".")[-1] == "localhost" or _is_address(name)


def _normal(name: str) -> str:
    """Returns the name in the form in which names are compared."""
    return name.removesuffix(".").lower()


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False
