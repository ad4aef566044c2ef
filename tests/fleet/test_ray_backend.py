"""The backend for Ray, without a cluster: actors that are gone, and a controller that fails."""

import fcntl
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleet.parts import Part, PartStatus, Role, State
from fleet.settings import FleetSettings

pytest.importorskip("ray", reason="ray is not installed: pip install 'quire[fleet]'")
pytestmark = pytest.mark.exhaustive


def test_a_lost_part_that_is_killed_has_ended() -> None:
    """Otherwise it would have to be killed for ever, and the fleet would never be down."""
    from fleet.ray_backend import RayBackend

    backend = RayBackend(FleetSettings("test", "ray", "model"), lambda: None)
    part = Part(Role.EXECUTOR, 1)
    backend._gone[part] = PartStatus(part, "test/executor-1/a", State.LOST, 0.0)
    backend.kill(part, "test/executor-1/another")
    assert backend._gone[part].state is State.LOST
    backend.kill(part, "test/executor-1/a")
    assert backend._gone[part].state is State.ENDED


def test_the_files_of_a_part_are_kept_while_tmp_is_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that another process has locked is left out by systemd-tmpfiles, which removes old files."""
    from fleet.ray_holder import _private_folder

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cleaner = os.open(_private_folder("test/gateway-0/a"), os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(cleaner)


def test_a_controller_that_fails_ends_so_that_ray_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its actor would answer on, and keep nothing running."""
    from fleet.ray_control import ControllerActor

    def fails() -> None:
        raise OSError("the head cannot be reached")

    monkeypatch.setattr(os, "_exit", sys.exit)
    actor = ControllerActor.__new__(ControllerActor)
    actor._name, actor._key = "test/controller", b"test"
    actor._controller = SimpleNamespace(run=fails)  # type: ignore[assignment]
    with pytest.raises(SystemExit) as ended:
        actor._run()
    assert ended.value.code == 1
