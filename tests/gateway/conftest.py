"""Fixtures of the scheduler's tests, for tests of the gateway in front of a real scheduler's servers."""

from tests.scheduler.conftest import byte_level, checkpoint, servers

__all__ = ["byte_level", "checkpoint", "servers"]
