"""Tells the ranks each other's addresses: gloo asks a store for them, and the store asks the channels.

A store of torch would listen at a port of its own, on all interfaces, without a check of its callers::

    rank 1 ── ADDRESS ──►          ── ADDRESSES ──► rank 1
    rank 2 ── ADDRESS ──►  rank 0  ── ADDRESSES ──► rank 2
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed

from executor.parallel.channel import Channel, ChannelBroken, FrameKind, values_of

Addresses = dict[str, str]  # by key: bytes in hexadecimal digits

Exchange = Callable[[Addresses], Addresses]
"""Returns the addresses of all ranks, given that of this one. Called once by each rank."""


class AddressStore(distributed.Store):  # type: ignore[misc,name-defined]  # torch has no types for it
    """The store that gloo reads and writes. Each rank sets one key, and then waits for the others.

    problem  the error of the exchange, because gloo turns it into another one
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._own: Addresses = {}
        self._all: Addresses | None = None
        self.problem: Exception | None = None

    def set(self, key: str, value: bytes) -> None:
        self._own[key] = value.hex()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def get(self, key: str) -> bytes:
        try:
            if self._all is None:
                self._all = self._exchange(self._own)
            return bytes.fromhex(self._all[key])
        except Exception as error:
            self.problem = error
            raise


def exchange_over(channel: Channel) -> Exchange:
    """Returns the exchange of a rank other than 0. It raises ChannelClosed and ChannelBroken."""

    def exchange(own: Addresses) -> Addresses:
        channel.send_values(FrameKind.ADDRESS, own)
        return addresses_of(values_of(channel.expect(FrameKind.ADDRESSES)))

    return exchange


def addresses_of(values: dict[str, Any]) -> Addresses:
    """Returns the addresses of a frame. Raises ChannelBroken for anything else."""
    for value in values.values():
        if not isinstance(value, str):
            raise ChannelBroken("sends no addresses")
    return values
