"""The gateway remembers the tenants of clients for a short time."""

import asyncio
from typing import Any

from gateway.routing.fair_line import Tenant
from gateway.schedulers.tenants import KEEP_S, MAX_CLIENTS, KnownTenants
from quire.errors import DeadlineExceededError, UnauthenticatedError, UnavailableError


async def test_tenants_are_asked_for_once_in_a_while() -> None:
    now_s, asked = [0.0], list[str]()

    async def ask(authorization: str) -> Tenant:
        asked.append(authorization)
        if authorization == "bad":
            raise UnauthenticatedError("no")
        return Tenant(f"tenant {authorization}")

    tenants = KnownTenants(lambda: now_s[0])
    for _ in range(3):
        assert await tenants.find("a", ask) == Tenant("tenant a")
        assert await tenants.find("bad", ask) is None
    assert asked == ["a", "bad"]
    now_s[0] += KEEP_S
    await tenants.find("a", ask)
    assert asked == ["a", "bad", "a"]
    for i in range(2 * MAX_CLIENTS):
        await tenants.find(str(i), ask)
    assert len(tenants._found) == MAX_CLIENTS


def test_the_credentials_are_not_kept() -> None:
    async def ask(authorization: str) -> Tenant:
        return Tenant("t")

    tenants = KnownTenants()
    asyncio.run(tenants.find("Bearer secret", ask))
    kept: Any = tenants._found
    assert "secret" not in repr(kept)


async def test_a_scheduler_that_does_not_answer_says_nothing_about_a_client() -> None:
    answers: list[Tenant | Exception] = [UnavailableError("draining"), DeadlineExceededError("late"), Tenant("t")]

    async def ask(authorization: str) -> Tenant:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    tenants = KnownTenants()
    assert [await tenants.find("a", ask) for _ in range(4)] == [None, None, Tenant("t"), Tenant("t")]
