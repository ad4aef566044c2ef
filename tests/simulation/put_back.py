"""Faults that the shell once had, or could have. Each is put back by a patch, and the simulation must find it.

These are faults of the services' loops and of their supervisor; `put_back_streams.py` has those of what outlives them.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from executor.errors import EpochRefused
from executor.server import Server
from executor.stream.leases import Leases
from executor.stream.plan_session import PlanSession
from quire.cli.restarts import Backoff
from scheduler.core import Events, FinishReason
from scheduler.engine import plan_wire
from scheduler.engine.dispatcher import EventDispatcher, FollowUps
from scheduler.engine.engine import Engine
from scheduler.engine.executor_client import PlanStream
from scheduler.engine.failures import Failures
from scheduler.engine.readiness import Readiness
from scheduler.engine.watchdog import ExecutorWatchdog
from scheduler.requests import intake
from scheduler.requests.response_stream import ResponseStream
from scheduler.requests.write_queue import WriteQueue
from tests.simulation import quire_serve

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from executor.plans.plan import StepPlan as DevicePlan


def hang_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """H7: neither the scheduler nor the executor notices that the device hangs."""
    patch.setattr(ExecutorWatchdog, "check", lambda watchdog, num_in_flight: None)
    patch.setattr(ExecutorWatchdog, "due_s", lambda watchdog, num_in_flight: None)

    async def wait(server: Server) -> bool:
        await server._ended.wait()
        return not server._device_lost

    patch.setattr(Server, "wait", wait)


def unlisted_exception_ends_the_engine(patch: pytest.MonkeyPatch) -> None:
    """H9."""
    patch.setattr(Failures, "add", lambda failures, error, now_s, *, has_committed: False)


def client_chooses_the_epoch(patch: pytest.MonkeyPatch) -> None:
    """C2: a plan with the largest epoch makes the device drop the plans of every later lease."""

    def check_order(stream: PlanSession, plan: DevicePlan) -> None:
        if plan.epoch < stream.epoch:
            raise EpochRefused(f"epoch {plan.epoch} is over")
        stream.epoch = plan.epoch

    patch.setattr(PlanSession, "check_order", check_order)


def few_restarts(patch: pytest.MonkeyPatch) -> None:
    """H6: the supervisor gives up after the sixth restart in a row."""
    next_delay_s = Backoff.next_delay_s

    def delay_s(backoff: Backoff, ran_s: float) -> float:
        delay_s = next_delay_s(backoff, ran_s)
        return delay_s if backoff.num_in_a_row <= 6 else 1e9

    patch.setattr(Backoff, "next_delay_s", delay_s)


def stopped_scheduler_not_replaced(patch: pytest.MonkeyPatch) -> None:
    """H7: a scheduler that is stopped is not replaced."""

    async def watch(*arguments: object) -> None:
        await asyncio.Event().wait()

    patch.setattr(quire_serve, "replace_when_hung", watch)


def lost_event(patch: pytest.MonkeyPatch) -> None:
    """The dispatcher loses the second end of a step."""
    tell_ends = EventDispatcher._tell_ends

    def tell(dispatcher: EventDispatcher, events: Events) -> None:
        del events.finished[1:2]
        tell_ends(dispatcher, events)

    patch.setattr(EventDispatcher, "_tell_ends", tell)


def lost_token(patch: pytest.MonkeyPatch) -> None:
    """A sink that joins while another one leaves misses its first token."""
    tell_tokens = EventDispatcher._tell_tokens

    def tell(dispatcher: EventDispatcher, events: Events) -> None:
        if events.started and events.finished:
            del events.sequences[:1], events.token_ids[:1]
        tell_tokens(dispatcher, events)

    patch.setattr(EventDispatcher, "_tell_tokens", tell)


def stop_not_carried_out(patch: pytest.MonkeyPatch) -> None:
    carry_out = Engine._carry_out

    def carry(engine: Engine, follow_ups: FollowUps) -> None:
        follow_ups.stops.clear()
        carry_out(engine, follow_ups)

    patch.setattr(Engine, "_carry_out", carry)


def sink_kept_after_cancel(patch: pytest.MonkeyPatch) -> None:
    def cancel(engine: Engine, request_id: int) -> None:
        if request_id in engine._dispatcher:
            engine._core.cancel(request_id)
            engine._requests_ended()

    patch.setattr(Engine, "cancel", cancel)


def request_kept_after_cancel(patch: pytest.MonkeyPatch) -> None:
    def cancel(engine: Engine, request_id: int) -> None:
        if engine._dispatcher.forget(request_id):
            engine._requests_ended()

    patch.setattr(Engine, "cancel", cancel)


def turn_lost_when_cancelled(patch: pytest.MonkeyPatch) -> None:
    """A stream that is cancelled right when its turn to write comes keeps the turn."""

    async def wait_for_turn(stream: ResponseStream) -> int:
        turn = asyncio.get_running_loop().create_future()
        stream._turn = turn
        if stream._has_news:
            stream._write_queue.enter(turn)
        try:
            return int(await turn)
        finally:
            stream._turn = None

    patch.setattr(ResponseStream, "_wait_for_turn", wait_for_turn)


def turn_never_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WriteQueue, "leave", lambda queue, group: None)


def broken_sink_not_told(patch: pytest.MonkeyPatch) -> None:
    """A fault that this simulation found: the client of a broken sink waited for ever."""
    patch.setattr(EventDispatcher, "_give_up", EventDispatcher._drop)


def half_cleaned(patch: pytest.MonkeyPatch) -> None:
    """Another: an error while a request is cleaned up left the rest of it behind."""
    patch.setattr(intake, "ExitStack", _Fragile)


class _Fragile:
    """An ExitStack that stops at the first error."""

    def __init__(self) -> None:
        self._callbacks: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def __enter__(self) -> _Fragile:
        return self

    def callback(self, function: Callable[..., object], *arguments: object) -> None:
        self._callbacks.append((function, arguments))

    def __exit__(self, *error: object) -> None:
        for function, arguments in [self._callbacks[i] for i in (3, 2, 1, 0, 4) if i < len(self._callbacks)]:
            function(*arguments)


def unreadable_result_ends_the_reader(patch: pytest.MonkeyPatch) -> None:
    """Another: an unexpected error in a result ended the reader of results, and later all requests."""
    read = PlanStream._read

    async def fragile(stream: PlanStream) -> None:
        await read(stream)
        if stream._error is not None and isinstance(stream._error.__context__, MemoryError | OSError | KeyError):
            raise stream._error.__context__

    patch.setattr(PlanStream, "_read", fragile)


def late_token_counts(patch: pytest.MonkeyPatch) -> None:
    """The place of a token for which the executor did not wait counts as a token."""
    decode = plan_wire.decode_result
    patch.setattr(plan_wire, "decode_result", lambda message, epoch: replace(decode(message, epoch), deferred=[]))


def lease_never_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "release", lambda leases, stream: None)


def ready_without_an_executor(patch: pytest.MonkeyPatch) -> None:
    update = Readiness.update

    def forgetful(readiness: Readiness, *, is_attached: bool, trouble: str = "") -> None:
        update(readiness, is_attached=True, trouble=trouble)

    patch.setattr(Readiness, "update", forgetful)


def requests_fail_with_their_executor(patch: pytest.MonkeyPatch) -> None:
    detach = Engine._detach

    def failing(engine: Engine, trouble: str = "") -> None:
        if engine._scheduler is not None:
            for request_id in list(engine._dispatcher._sinks):
                engine._dispatcher.fail(request_id, FinishReason.ERROR)
                engine._scheduler.cancel(request_id)
            engine._requests_ended()
        detach(engine, trouble)

    patch.setattr(Engine, "_detach", failing)
