from collections.abc import Callable, Iterator

import pytest

from quire import channel
from quire.channel import CHANNEL_OPTIONS
from tests.support.client.scripted_server import ScriptedServer
from tests.support.e2e.proxy import Proxy


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    scripted.start()
    yield scripted
    scripted.stop()


@pytest.fixture
def network(server: ScriptedServer) -> Iterator[Proxy]:
    proxy = Proxy(server.address)
    proxy.start()
    yield proxy
    proxy.close()


@pytest.fixture
def set_keepalive(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Returns a function that sets the interval and the timeout of the clients' pings, in milliseconds."""
    names = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
    assert names <= {name for name, _ in CHANNEL_OPTIONS}

    def set_all(interval_ms: int) -> None:
        options = tuple((name, interval_ms if name in names else value) for name, value in CHANNEL_OPTIONS)
        monkeypatch.setattr(channel, "CHANNEL_OPTIONS", options)

    return set_all
