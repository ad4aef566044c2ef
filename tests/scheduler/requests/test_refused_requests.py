"""A request that is refused for now does not count against the requests a minute of its tenant."""

from collections.abc import Callable

import pytest

from scheduler.core import InvalidRequest, QueueFull, TenantLimitReached, Unavailable
from scheduler.engine.engine import ServerState
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.intake import Intake, ServedModel
from scheduler.requests.request_fields import RequestFields
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.telemetry.request_observer import Caller
from scheduler.tenants.settings import Tenants, TenantSettings
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.tokenizer import Tokenizer
from tests.support.scheduler.fake_engine import FakeEngine

LIMIT = 3


def drains(engine: FakeEngine) -> None:
    engine.become(ServerState.DRAINING)


def is_full(engine: FakeEngine) -> None:
    engine.refusal = QueueFull("full")


def serves(engine: FakeEngine) -> None:
    engine.become(ServerState.SERVING)
    engine.refusal = None


async def ask(intake: Intake, max_tokens: int = 2) -> None:
    fields = RequestFields({"text": "hello", "stopping.max_tokens": max_tokens})
    async with intake.open(fields, Caller(), None):
        pass


@pytest.mark.parametrize(("refuses", "error"), [(drains, Unavailable), (is_full, QueueFull)])
async def test_requests_that_may_be_tried_again_do_not_count(
    refuses: Callable[[FakeEngine], None], error: type[Exception], checkpoint: Checkpoint
) -> None:
    engine = FakeEngine()
    model = ServedModel(Tokenizer.load(checkpoint), None, GenerationDefaults())
    intake = Intake(engine, model, SchedulerMetrics(), tenants=Tenants(TenantSettings(requests_per_minute=LIMIT)))  # type: ignore[arg-type]
    refuses(engine)
    for _ in range(2 * LIMIT):
        with pytest.raises(error) as refused:
            await ask(intake)
        assert not isinstance(refused.value, TenantLimitReached)
    serves(engine)
    for _ in range(LIMIT - 1):
        await ask(intake)
    with pytest.raises(InvalidRequest):  # which counts: it never becomes right
        await ask(intake, max_tokens=-1)
    with pytest.raises(TenantLimitReached):
        await ask(intake)
