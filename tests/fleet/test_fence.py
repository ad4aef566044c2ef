"""A part on a node that does not count any more ends itself."""

import asyncio
import threading

import pytest

from tests.support.waiting import until

pytest.importorskip("ray", reason="ray is not installed: pip install 'quire[fleet]'")
pytestmark = pytest.mark.exhaustive


async def test_a_node_that_the_head_has_given_up_ends_its_part_at_once() -> None:
    from fleet.ray_holder import Fence

    is_alive, reasons = True, []
    fence = Fence(lambda: is_alive, reasons.append, fence_s=1000, interval_s=0.01)
    fence.start()
    await asyncio.sleep(0.1)
    assert not reasons
    is_alive = False
    await until(lambda: reasons)
    assert reasons == ["the head has given this node up"]


async def test_a_head_that_does_not_answer_ends_it_after_a_while() -> None:
    from fleet.ray_holder import Fence

    def no_head() -> bool:
        raise ConnectionError("no head")

    def silent_head() -> bool:
        threading.Event().wait(60)
        return True

    for is_alive in (no_head, silent_head):
        reasons: list[str] = []
        Fence(is_alive, reasons.append, fence_s=0.2, interval_s=0.01).start()
        await until(lambda reasons=reasons: reasons)
        assert "not answered" in reasons[0]


async def test_a_short_silence_of_the_head_ends_nothing() -> None:
    from fleet.ray_holder import Fence

    reasons: list[str] = []
    is_there = threading.Event()

    def head() -> bool:
        if not is_there.is_set():
            raise ConnectionError("no head")
        return True

    fence = Fence(head, reasons.append, fence_s=30, interval_s=0.01)
    fence.start()
    await asyncio.sleep(0.1)
    is_there.set()
    await asyncio.sleep(0.1)
    fence.close()
    assert not reasons
