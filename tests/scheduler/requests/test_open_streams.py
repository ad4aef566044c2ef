"""The number of open streams is bounded, and no tenant can hold all of them."""

from contextlib import ExitStack

import pytest

from scheduler.core import QueueFull
from scheduler.requests.open_streams import OpenStreams


class Observed:
    def __init__(self) -> None:
        self.codes: list[str] = []

    def refused(self, code: str) -> None:
        self.codes.append(code)


def fill(streams: OpenStreams, stack: ExitStack, tenant: str, most: int = 100) -> int:
    """Opens streams until one is refused; returns their number."""
    for number in range(most):
        try:
            stack.enter_context(streams.opened(tenant, Observed()))  # type: ignore[arg-type]
        except QueueFull:
            return number
    return most


def test_one_tenant_may_open_all_streams_and_is_refused_more() -> None:
    streams, observed = OpenStreams(8), Observed()
    with ExitStack() as stack:
        assert fill(streams, stack, "a") == 8
        with pytest.raises(QueueFull, match="8 streams are open"), streams.opened("a", observed):  # type: ignore[arg-type]
            pass
        assert observed.codes == ["resource_exhausted"]
    assert len(streams) == 0


def test_another_tenant_still_gets_its_part() -> None:
    streams = OpenStreams(8)
    with ExitStack() as stack:
        assert fill(streams, stack, "a") == 8
        assert fill(streams, stack, "b") == 4
        assert fill(streams, stack, "c") == 2
        assert fill(streams, stack, "a") == 0
        assert len(streams) == 14


def test_the_number_of_all_streams_is_bounded_however_many_tenants_there_are() -> None:
    streams = OpenStreams(64)
    with ExitStack() as stack:
        for number in range(1000):
            fill(streams, stack, str(number))
        assert len(streams) <= 128


def test_an_error_in_the_block_gives_the_stream_back() -> None:
    streams = OpenStreams(1)
    with pytest.raises(RuntimeError), streams.opened("a", Observed()):  # type: ignore[arg-type]
        raise RuntimeError
    assert not streams
