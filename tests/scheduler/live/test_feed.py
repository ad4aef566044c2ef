"""The feed of a running engine: what viewers come to know, who pays, and what happens to slow ones."""

import asyncio
from collections.abc import Callable

import pytest

from scheduler.core import BlockState, FinishReason, InvariantViolation, QueueFull, Request, Sequence, SequenceParams
from scheduler.core.state import SchedulerState
from scheduler.live.feed import MAX_PENDING, MAX_VIEWERS, NOTHING_NEW, Viewer
from scheduler.live.snapshot import CACHED
from tests.scheduler.live.conftest import Served
from tests.support.live.picture import Picture


class Ending:
    """A sink that waits for the end."""

    def __init__(self, num_sequences: int) -> None:
        self.num_open = num_sequences
        self.done = asyncio.Event()

    def started(self, num_cached_tokens: int) -> None: ...

    def tokens(self, index: int, token_ids: list[int]) -> None: ...

    def finished(self, index: int, reason: FinishReason, num_preemptions: int) -> None:
        self.num_open -= 1
        if not self.num_open:
            self.done.set()


def submit(served: Served, num_tokens: int = 20, n: int = 1) -> Ending:
    prompt = [served.engine.new_request_id() % 100 + i for i in range(10)]
    request = Request(
        served.engine.new_request_id(),
        prompt,
        SequenceParams(max_total_tokens=len(prompt) + num_tokens),
        seeds=tuple(range(n)),
    )
    sink = Ending(n)
    served.engine.submit(request, sink)
    return sink


async def follow(viewer: Viewer, picture: Picture, until: Callable[[], bool]) -> None:
    """Takes events until it is so. Comments come often, so that a condition that no event makes true is seen too."""
    async with asyncio.timeout(30):
        while not until():
            event = await viewer.next_event(0.01)
            assert event is not None
            picture.take_event(event)


def as_values(served: Served) -> list[int]:
    """The block map of the Admin service, as the page has it."""
    runs = served.engine.block_map().blocks
    return [CACHED if run.state is BlockState.CACHED else run.ref_count for run in runs for _ in range(run.length)]


async def test_whoever_follows_has_the_block_map(served: Served) -> None:
    picture = Picture()
    with served.feed.viewer() as viewer:
        await follow(viewer, picture, lambda: picture.num_frames > 0)
        sinks = [submit(served, num_tokens=100, n=n) for n in (1, 3, 2, 1)]
        await follow(viewer, picture, lambda: len(picture.sequences) > 2)
        await follow(viewer, picture, lambda: all(sink.done.is_set() for sink in sinks))
        await follow(viewer, picture, lambda: not picture.sequences and picture.blocks == as_values(served))
    assert CACHED in picture.blocks
    assert picture.num_key_frames == 1
    core = served.engine.core
    assert core is not None
    assert [step_id for step_id, _ in picture.steps] == list(range(1, core.state.step_id + 1))
    assert picture.numbers["generated_tokens"] == 7 * 100


async def test_a_newcomer_gets_all_at_once(served: Served) -> None:
    """The executor hangs: the picture of the moment is all there is."""
    picture = Picture()
    with served.feed.viewer() as first:
        submit(served, num_tokens=300)
        await follow(first, picture, lambda: len(picture.steps) > 5)
        served.client.is_hanging = True
        await follow(first, picture, lambda: served.engine.core is not None and served.engine.core.num_in_flight == 2)
        while (event := await first.next_event(0.1)) != NOTHING_NEW:
            assert event is not None
            picture.take_event(event)
        assert picture.blocks == as_values(served)
        with served.feed.viewer() as second:
            other = Picture()
            await follow(second, other, lambda: other.num_frames > 0)
    assert other.num_key_frames == 1
    assert (other.blocks, other.sequences, other.rows) == (picture.blocks, picture.sequences, picture.rows)
    assert other.rows


async def test_one_encoding_for_all_viewers(served: Served) -> None:
    with served.feed.viewer() as one, served.feed.viewer() as other:
        keys = [await viewer.next_event(1) for viewer in (one, other)]
        assert keys[0] is keys[1]
        sink = submit(served)
        deltas = [await viewer.next_event(30) for viewer in (one, other)]
        assert deltas[0] is deltas[1]
        await sink.done.wait()


async def test_nothing_is_computed_for_nobody(served: Served) -> None:
    await submit(served).done.wait()
    assert served.feed.num_frames == 0
    picture = Picture()
    with served.feed.viewer() as viewer:
        await follow(viewer, picture, lambda: picture.num_frames > 0)
        num_frames = served.feed.num_frames
    await submit(served).done.wait()
    await asyncio.sleep(0.02)
    assert served.feed.num_frames == num_frames
    assert served.plans.take() == (None, [])
    assert served.feed._task is None


async def test_an_idle_engine_has_no_news(served: Served) -> None:
    with served.feed.viewer() as viewer:
        await viewer.next_event(1)
        num_frames = served.feed.num_frames
        assert await viewer.next_event(0.05) == NOTHING_NEW
        assert served.feed.num_frames == num_frames


async def test_a_slow_viewer_gets_fewer_frames_and_none_too_many_are_kept(served: Served) -> None:
    picture, quick_picture = Picture(), Picture()
    with served.feed.viewer() as slow, served.feed.viewer() as quick:
        await follow(slow, picture, lambda: picture.num_frames > 0)
        sink = submit(served, num_tokens=300)
        await follow(quick, quick_picture, sink.done.is_set)
        assert quick_picture.num_frames > 3 * MAX_PENDING
        assert len(slow._pending) <= MAX_PENDING
        await follow(slow, picture, lambda: not picture.sequences and picture.blocks == as_values(served))
    assert picture.num_key_frames == 2
    assert picture.num_frames < quick_picture.num_frames


async def test_seats_are_bounded(served: Served) -> None:
    viewers = [served.feed.viewer() for _ in range(MAX_VIEWERS)]
    for viewer in viewers:
        viewer.__enter__()
    with pytest.raises(QueueFull):
        served.feed.viewer().__enter__()
    viewers.pop().__exit__(None, None, None)
    viewers.append(served.feed.viewer())
    viewers[-1].__enter__()
    for viewer in viewers:
        viewer.__exit__(None, None, None)
    assert not served.feed._viewers


async def test_a_lost_executor_is_seen(served: Served) -> None:
    picture = Picture()
    with served.feed.viewer() as viewer:
        sink = submit(served, num_tokens=300)
        await follow(viewer, picture, lambda: len(picture.steps) > 5)
        served.client.is_up = False
        served.client.lose()
        await follow(viewer, picture, lambda: picture.server["state"] == "waiting for executor")
        await follow(viewer, picture, lambda: picture.numbers["waiting"] == 1)
        assert set(picture.blocks) == {0}
        served.client.is_up = True
        await follow(viewer, picture, lambda: picture.server["state"] == "serving")
        await follow(viewer, picture, sink.done.is_set)
    assert picture.num_key_frames == 1


async def test_closing_ends_every_stream(served: Served) -> None:
    with served.feed.viewer() as viewer:
        await viewer.next_event(1)
        served.feed.close()
        assert await viewer.next_event(30) is None


async def test_an_open_page_follows_an_engine_that_begins_anew(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next plans come before the feed's next look: of them the old core knows nothing."""

    def broken(state: SchedulerState, sequence: Sequence, reason: FinishReason) -> None:
        monkeypatch.undo()
        raise InvariantViolation("on purpose")

    picture = Picture()
    with served.feed.viewer() as viewer:
        await follow(viewer, picture, lambda: picture.num_frames > 0)
        served.feed._interval_s = 0.3
        monkeypatch.setattr(SchedulerState, "finish", broken)
        old_core = served.engine.core
        sinks = [submit(served)]
        await asyncio.wait_for(sinks[0].done.wait(), 10)
        sinks += [submit(served, num_tokens=200) for _ in range(3)]
        await follow(viewer, picture, lambda: all(sink.done.is_set() for sink in sinks))
        served.feed._interval_s = 0.001
        sinks.append(submit(served))
        await follow(viewer, picture, sinks[-1].done.is_set)
        await follow(viewer, picture, lambda: not picture.sequences and picture.blocks == as_values(served))
    assert served.engine.core is not old_core
