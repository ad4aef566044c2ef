"""Requests and tokens a minute, by a clock that the test sets."""

import pytest

from scheduler.core import QueueFull
from scheduler.tenants import rate_limits
from scheduler.tenants.rate_limits import RateLimits
from scheduler.tenants.settings import Tenants, TenantSettings


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def limits_of(clock: Clock, **settings: int) -> RateLimits:
    return RateLimits(Tenants(TenantSettings(**settings)), clock)  # type: ignore[arg-type]


def test_requests_beyond_the_limit_are_refused_until_the_bucket_has_refilled() -> None:
    clock = Clock()
    limits = limits_of(clock, requests_per_minute=6)
    for _ in range(6):
        limits.take_request("a")
    with pytest.raises(QueueFull, match="more than 6 requests a minute") as refusal:
        limits.take_request("a")
    assert refusal.value.retry_after_s == pytest.approx(10)
    limits.take_request("b")
    clock.now_s += 10
    limits.take_request("a")


def test_output_is_charged_afterwards_and_puts_later_requests_off() -> None:
    clock = Clock()
    limits = limits_of(clock, tokens_per_minute=60)
    limits.take_tokens("a", 10)
    limits.add_tokens("a", 90)
    with pytest.raises(QueueFull) as refusal:
        limits.take_tokens("a", 10)
    assert refusal.value.retry_after_s == pytest.approx(50)


def test_a_prompt_beyond_the_limit_is_taken_from_a_full_bucket() -> None:
    clock = Clock()
    limits = limits_of(clock, tokens_per_minute=60)
    limits.take_tokens("a", 600)
    clock.now_s += 540
    with pytest.raises(QueueFull):
        limits.take_tokens("a", 1)


def test_without_limits_nothing_is_counted() -> None:
    limits = limits_of(Clock())
    for _ in range(1000):
        limits.take_request("a")
        limits.take_tokens("a", 10**9)
    limits.add_tokens("a", 10**9)


def test_full_buckets_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "MAX_BUCKETS", 10)
    clock = Clock()
    limits = limits_of(clock, requests_per_minute=6)
    for number in range(100):
        limits.take_request(f"tenant {number}")
        clock.now_s += 30
    assert len(limits._buckets) <= 10
