"""The tokens that a client gets count at the replica that sends them, and for the tenant that has waited."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from gateway.routing.choice import Prompt
from gateway.routing.fair_line import Tenant
from gateway.routing.load import ReplicaLoad
from gateway.schedulers.route import Route, Router
from gateway.schedulers.waiting import GENERATED_TOKEN_COST, WaitingRequests
from tests.support.gateway.fake_scheduler import delta, started
from tests.support.gateway.routed_fleet import replicas_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from gateway.routing.replica import ReplicaState


class OnlyOne:
    def choose(self, prompt: Prompt, replicas: object, refused: Collection[str] = ()) -> str | None:
        return None if "a" in refused else "a"


async def tenant() -> Tenant:
    return Tenant("a tenant")


def routed(waiting: WaitingRequests | None = None) -> tuple[Route, ReplicaState]:
    """Returns the route of a request of 50 tokens, and the only replica."""
    replicas = replicas_of("a")
    replicas.report("a", ReplicaLoad(prefill_s_per_token=0.001), 0)
    schedulers: Any = {"a": SimpleNamespace(address="a")}
    router = Router(schedulers, replicas, OnlyOne(), "cost")
    return Route(router, Prompt(b"", 50), waiting, tenant, None), replicas["a"]


def test_a_prompt_leaves_the_queue_with_the_first_message_that_has_a_token() -> None:
    route, state = routed()
    route.first()
    assert state.backlog_s == pytest.approx(0.05)
    route.received(started())
    assert state.backlog_s == pytest.approx(0.05)
    route.received(delta(0, "a", 7))
    assert state.backlog_s == 0.0


def test_the_prompt_of_the_next_try_leaves_the_queue_with_its_own_first_token() -> None:
    route, state = routed()
    for _ in range(2):
        route.first()
        assert state.backlog_s == pytest.approx(0.05)
        route.received(delta(0, "a", 7))
        assert state.backlog_s == 0.0


def test_a_request_that_is_sent_while_none_is_ready_counts_too() -> None:
    route, _ = routed()
    router = route._router
    router._choice = SimpleNamespace(choose=lambda *_: None)
    route.first()
    router._choice = OnlyOne()
    route.first()
    assert router.chosen == {("a", "not_ready"): 1, ("a", "broken"): 1}


async def test_every_token_of_a_request_that_has_waited_is_charged_to_its_tenant() -> None:
    waiting = WaitingRequests(max_waiting=1, max_wait_s=60.0)
    charged: list[float] = []
    cast("Any", waiting).charge = lambda tenant, service: charged.append(service)
    route, _ = routed(waiting)
    waits = asyncio.create_task(route.wait())
    await asyncio.sleep(0)
    waiting.wake()
    await waits
    waiting.close()
    route.first()
    for num_tokens in (1, 3):
        route.received(delta(0, "a", *range(num_tokens)))
    assert charged == [GENERATED_TOKEN_COST, 3 * GENERATED_TOKEN_COST]
