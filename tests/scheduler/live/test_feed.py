"""Tests the feed of a running engine: what viewers receive, what it costs, and what happens to slow viewers."""

import asyncio
from collections.abc import Callable

import pytest

from scheduler.core import BlockState, FinishReason, InvariantViolation, QueueFull, Request, Sequence, SequenceParams
from scheduler.core.state import SchedulerState
from scheduler.live.feed import MAX_PENDING, MAX_VIEWERS, NOTHING_NEW, LiveFeed, Viewer
from scheduler.live.plan_log import PlanLog
from scheduler.live.snapshot import CACHED
from tests.support.live.page_state import PageState
from tests.support.live.served import Served
from tests.support.scheduler.engine_rig import running_engine
from tests.support.scheduler.engine_rig import submit as submit_to
from tests.support.scheduler.fake_client import FakeClient
from tests.support.waiting import until


class EndSink:
    """Waits for the end of its request."""

    def __init__(self, num_sequences: int) -> None:
        self.num_open = num_sequences
        self.done = asyncio.Event()

    def started(self, num_cached_tokens: int) -> None: ...

    def tokens(self, index: int, token_ids: list[int]) -> None: ...

    def finished(self, index: int, reason: FinishReason, num_preemptions: int) -> None:
        self.num_open -= 1
        if not self.num_open:
            self.done.set()


def submit(served: Served, num_tokens: int = 20, n: int = 1) -> EndSink:
    prompt = [served.engine.new_request_id() % 100 + i for i in range(10)]
    request = Request(
        served.engine.new_request_id(),
        prompt,
        SequenceParams(max_total_tokens=len(prompt) + num_tokens),
        seeds=tuple(range(n)),
    )
    sink = EndSink(n)
    served.engine.submit(request, sink)
    return sink


async def follow(viewer: Viewer, page_state: PageState, condition: Callable[[], bool]) -> None:
    """Takes events until the condition is true. Frequent comments make sure that it is checked without events, too."""
    async with asyncio.timeout(30):
        while not condition():
            event = await viewer.next_event(0.01)
            assert event is not None
            page_state.take_event(event)


def as_values(served: Served) -> list[int]:
    """Returns the block map of the Admin service in the form that the page has."""
    runs = served.engine.block_map().blocks
    return [CACHED if run.state is BlockState.CACHED else run.ref_count for run in runs for _ in range(run.length)]


async def test_a_viewer_has_the_block_map(served: Served) -> None:
    page_state = PageState()
    with served.feed.viewer() as viewer:
        await follow(viewer, page_state, lambda: page_state.num_frames > 0)
        sinks = [submit(served, num_tokens=100, n=n) for n in (1, 3, 2, 1)]
        await follow(viewer, page_state, lambda: len(page_state.sequences) > 2)
        await follow(viewer, page_state, lambda: all(sink.done.is_set() for sink in sinks))
        await follow(viewer, page_state, lambda: not page_state.sequences and page_state.blocks == as_values(served))
    assert CACHED in page_state.blocks
    assert page_state.num_key_frames == 1
    core = served.engine.core
    assert core is not None
    assert [step_id for step_id, _ in page_state.steps] == list(range(1, core.state.step_id + 1))
    assert page_state.numbers["generated_tokens"] == 7 * 100


async def test_a_new_viewer_gets_the_whole_state_at_once(served: Served) -> None:
    """The executor hangs, so that the state does not change."""
    page_state = PageState()
    with served.feed.viewer() as first:
        submit(served, num_tokens=300)
        await follow(first, page_state, lambda: len(page_state.steps) > 5)
        served.client.is_hanging = True
        await follow(
            first, page_state, lambda: served.engine.core is not None and served.engine.core.num_in_flight == 2
        )
        while (event := await first.next_event(0.1)) != NOTHING_NEW:
            assert event is not None
            page_state.take_event(event)
        assert page_state.blocks == as_values(served)
        with served.feed.viewer() as second:
            other = PageState()
            await follow(second, other, lambda: other.num_frames > 0)
    assert other.num_key_frames == 1
    assert (other.blocks, other.sequences, other.rows) == (page_state.blocks, page_state.sequences, page_state.rows)
    assert other.rows


async def test_all_viewers_get_the_same_encoded_event(served: Served) -> None:
    with served.feed.viewer() as one, served.feed.viewer() as other:
        keys = [await viewer.next_event(1) for viewer in (one, other)]
        assert keys[0] is keys[1]
        sink = submit(served)
        deltas = [await viewer.next_event(30) for viewer in (one, other)]
        assert deltas[0] is deltas[1]
        await sink.done.wait()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[LiveFeed]:
    """The feed of each frame that was made."""
    feeds: list[LiveFeed] = []
    send_frame = LiveFeed._send_frame

    def noted(feed: LiveFeed) -> None:
        feeds.append(feed)
        send_frame(feed)

    monkeypatch.setattr(LiveFeed, "_send_frame", noted)
    return feeds


async def test_no_frame_is_made_without_viewers(served: Served, sent: list[LiveFeed]) -> None:
    await submit(served).done.wait()
    assert not sent
    page_state = PageState()
    with served.feed.viewer() as viewer:
        await follow(viewer, page_state, lambda: page_state.num_frames > 0)
        num_frames = len(sent)
    await submit(served).done.wait()
    await asyncio.sleep(0.02)
    assert len(sent) == num_frames > 0
    assert served.plans.take() == (None, [])
    assert served.feed._task is None


async def test_an_idle_engine_sends_no_frames(served: Served, sent: list[LiveFeed]) -> None:
    with served.feed.viewer() as viewer:
        await viewer.next_event(1)
        num_frames = len(sent)
        assert await viewer.next_event(0.05) == NOTHING_NEW
        assert len(sent) == num_frames > 0


async def test_a_slow_viewer_gets_fewer_frames_and_few_are_kept_for_it(served: Served) -> None:
    page_state, quick_state = PageState(), PageState()
    with served.feed.viewer() as slow, served.feed.viewer() as quick:
        await follow(slow, page_state, lambda: page_state.num_frames > 0)
        sink = submit(served, num_tokens=300)
        await follow(quick, quick_state, sink.done.is_set)
        assert quick_state.num_frames > 3 * MAX_PENDING
        assert len(slow._pending) <= MAX_PENDING
        await follow(slow, page_state, lambda: not page_state.sequences and page_state.blocks == as_values(served))
    assert page_state.num_key_frames == 2
    assert page_state.num_frames < quick_state.num_frames


async def test_the_number_of_viewers_is_bounded(served: Served) -> None:
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


async def test_a_lost_executor_is_shown(served: Served) -> None:
    page_state = PageState()
    with served.feed.viewer() as viewer:
        sink = submit(served, num_tokens=300)
        await follow(viewer, page_state, lambda: len(page_state.steps) > 5)
        served.client.is_up = False
        served.client.lose()
        await follow(viewer, page_state, lambda: page_state.server["state"] == "waiting for executor")
        await follow(viewer, page_state, lambda: page_state.numbers["waiting"] == 1)
        assert set(page_state.blocks) == {0}
        served.client.is_up = True
        await follow(viewer, page_state, lambda: page_state.server["state"] == "serving")
        await follow(viewer, page_state, sink.done.is_set)
    assert page_state.num_key_frames == 1


async def test_close_ends_every_stream(served: Served) -> None:
    with served.feed.viewer() as viewer:
        await viewer.next_event(1)
        served.feed.close()
        assert await viewer.next_event(30) is None


async def test_an_open_page_follows_an_engine_that_replaces_its_core(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new core's first plans come before the feed's next frame, and the old core does not know them."""

    def broken(state: SchedulerState, sequence: Sequence, reason: FinishReason) -> None:
        monkeypatch.undo()
        raise InvariantViolation("on purpose")

    page_state = PageState()
    with served.feed.viewer() as viewer:
        await follow(viewer, page_state, lambda: page_state.num_frames > 0)
        served.feed._interval_s = 0.3
        monkeypatch.setattr(SchedulerState, "finish", broken)
        old_core = served.engine.core
        sinks = [submit(served)]
        await asyncio.wait_for(sinks[0].done.wait(), 10)
        sinks += [submit(served, num_tokens=200) for _ in range(3)]
        await follow(viewer, page_state, lambda: all(sink.done.is_set() for sink in sinks))
        served.feed._interval_s = 0.001
        sinks.append(submit(served))
        await follow(viewer, page_state, sinks[-1].done.is_set)
        await follow(viewer, page_state, lambda: not page_state.sequences and page_state.blocks == as_values(served))
    assert served.engine.core is not old_core


async def test_the_times_of_steps_go_on_with_a_new_core() -> None:
    """Its epochs and steps have the numbers of the old core's again."""
    client = FakeClient()
    client.step_s = 0.001
    async with running_engine(client) as engine:
        feed = LiveFeed(engine, PlanLog(), str)
        await asyncio.wait_for(submit_to(engine, [1, 2, 3], 40).done.wait(), 30)
        assert len(feed._new_durations()) >= 40
        engine._signal.fail(RuntimeError("a bug of the core, on purpose"))
        await until(lambda: engine.failures.num_failures > 0 and engine.is_ready)
        await asyncio.wait_for(submit_to(engine, [1, 2, 3], 10).done.wait(), 30)
        assert 10 <= len(feed._new_durations()) <= 20
