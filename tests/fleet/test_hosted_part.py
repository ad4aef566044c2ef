"""The state of a part on its machine."""

import asyncio
import errno
import os
import sys
from pathlib import Path

import pytest

from fleet import hosted_part
from fleet.backend import BackendError
from fleet.hosted_part import HostedPart
from fleet.local import LocalBackend
from fleet.parts import Part, Role, State
from fleet.probes import SILENT_S
from fleet.settings import FleetSettings
from tests.support.waiting import until

# Says that it serves, listens nowhere, and does not end when it is told to drain.
_SILENT = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); print('ready x', flush=True)\n"


@pytest.mark.parametrize(("drains", "expected"), [(False, State.HUNG), (True, State.READY)])
async def test_a_gateway_that_drains_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drains: bool, expected: State
) -> None:
    """It closes its listener first: probes cannot reach it any more while its streams go on."""
    script = f"{_SILENT}while True: time.sleep(0.1)"
    monkeypatch.setattr(hosted_part, "quire_command", lambda: (sys.executable, "-c", script))
    monkeypatch.setitem(SILENT_S, Role.GATEWAY, 1.0)
    settings = FleetSettings("test", "local", "model", gateway_listen="127.0.0.1:0")
    part = HostedPart(settings, Part(Role.GATEWAY, 0), tmp_path / "gateway-0", None, dies_with_parent=False)
    part.start(())
    try:
        await until(lambda: state_of(part) is not State.STARTING)
        if drains:
            part.drain(breaks_off=False)
        states = {State.READY}
        for _ in range(30):
            await asyncio.sleep(0.1)
            states.add(state_of(part))
        assert states == {State.READY, expected}
    finally:
        part.kill()


def state_of(part: HostedPart) -> State:
    status = part.status()
    assert status is not None
    return status.state


@pytest.mark.parametrize("verb", ["address", "drain", "kill"])
def test_an_error_of_the_system_is_one_of_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    backend = LocalBackend(FleetSettings("test", "local", "model"), tmp_path / "parts")
    part = Part(Role.EXECUTOR, 0)
    backend._host(part)
    for name in ("tell", "drain", "kill"):
        monkeypatch.setattr(HostedPart, name, fails)
    act = {
        "address": lambda: backend.address(part, "", ()),
        "drain": lambda: backend.drain(part, "", moves_streams=True),
        "kill": lambda: backend.kill(part, ""),
    }
    with pytest.raises(BackendError, match=r"executor-0: .*No space left"):
        act[verb]()
