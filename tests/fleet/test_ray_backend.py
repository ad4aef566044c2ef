"""The backend for Ray, without a cluster: actors that are gone."""

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
