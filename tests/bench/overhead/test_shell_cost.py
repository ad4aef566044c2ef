"""The scheduler process under load, with an executor that computes nothing and clients over gRPC."""

from array import array
from collections.abc import Sequence

import pytest

from bench.overhead import shell_cost
from bench.overhead.null_executor import NullBatch
from bench.overhead.shell_cost import Cost, harness, measure, table
from bench.overhead.stream_load import Load
from quire.executor.v1 import executor_pb2 as pb


def packed(*values: int) -> bytes:
    return array("i", values).tobytes()


def unpacked(data: bytes) -> list[int]:
    return array("i", data).tolist()


def admission(slot: int, num_tokens: int, max_total_tokens: int) -> pb.Admission:
    params = pb.SequenceParams(max_total_tokens=max_total_tokens)
    return pb.Admission(slot=slot, token_ids=packed(*range(num_tokens)), params=params)


def assert_complete(costs: Sequence[Cost], *num_clients: int) -> None:
    """The measurement itself counts the tokens of every stream and compares its text."""
    assert tuple(cost.num_clients for cost in costs) == num_clients
    for cost in costs:
        assert cost.num_checked_tokens >= cost.num_clients * 2 * 30
        assert 0 < cost.num_deltas <= cost.num_tokens <= cost.num_checked_tokens


async def test_streams_are_complete_at_any_number_of_clients() -> None:
    """They have a call each, or share one."""
    async with harness() as running:
        for num_calls in (0, 1):
            costs = [await running.measure(Load(number, 30, 2), num_calls) for number in (1, 2, 40)]
            assert_complete(costs, 1, 2, 40)


async def test_streams_that_share_calls_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_cost, "_MIN_TOKENS", 240)
    costs = await measure([2, 40], num_tokens=30, num_calls=3)
    assert_complete(costs, 2, 40)
    assert len(table(costs).splitlines()) == 3


async def test_without_load_every_token_has_its_own_message() -> None:
    async with harness(step_ms=20) as running:
        cost = await running.measure(Load(num_clients=2, num_tokens=20, num_requests=1))
    # If other work stops this process for longer than a step, the tokens that meanwhile arrived share a message.
    assert cost.num_coalesced_deltas < cost.num_deltas / 4
    assert cost.executor_idle_ratio is not None


def test_null_executor_samples_when_a_prompt_is_computed() -> None:
    batch = NullBatch(num_slots=4, vocab_size=100)
    plan = pb.StepPlan(admissions=[admission(2, num_tokens=5, max_total_tokens=7)], row_counts=packed(2, 3))
    assert batch.step(plan) == (b"", b"")
    first = batch.step(pb.StepPlan(row_counts=packed(2, 2)))
    assert (len(first[0]), first[1]) == (4, b"")
    last = batch.step(pb.StepPlan(row_counts=packed(2, 1)))
    assert (len(last[0]), last[1]) == (4, bytes([pb.END_REASON_LENGTH]))
    overrun = batch.step(pb.StepPlan())
    assert (len(overrun[0]), overrun[1]) == (4, b"")
    assert batch.step(pb.StepPlan(retired_slots=packed(2))) == (b"", b"")


@pytest.mark.parametrize("child", [0, 3])
def test_null_executor_forks(child: int) -> None:
    batch = NullBatch(num_slots=4, vocab_size=100)
    plan = pb.StepPlan(
        admissions=[admission(1, num_tokens=2, max_total_tokens=3)],
        row_counts=packed(1, 2),
        forks=[pb.Fork(parent_slot=1, child_slot=child)],
    )
    token_ids, end_reasons = batch.step(plan)
    assert len(unpacked(token_ids)) == 2
    assert list(end_reasons) == [pb.END_REASON_LENGTH] * 2
