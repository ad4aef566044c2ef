"""A stream goes on only with the model and the parameters with which it began, also if either changes meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from quire.v1 import generation_pb2 as pb
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.status import OtherModel, status_of
from tests.support.scheduler.broken_streams import MODEL, Messages, Models, content, resumption
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from scheduler.text.checkpoint import Checkpoint

BEAMS = {"beam_width": 2, "n": 2}
NEW_WEIGHTS = replace(MODEL, weights_digest="new")


@pytest.fixture
async def models(checkpoint: Checkpoint) -> AsyncIterator[Models]:
    models = Models(checkpoint, (1,))
    yield models
    await models.close()


def request(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        resumable=True,
        request_id="a",
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling=sampling,
        stopping={"max_tokens": 8},
    )


async def beginning(models: Models, asked: pb.GenerateRequest, most: int) -> Messages:
    async with models.open_scheduler() as scheduler:
        return await scheduler.messages(asked, most=most)


@pytest.mark.parametrize(
    "defaults",
    [
        {"sampling": {"temperature": 0.5}},
        {"sampling": {"repetition_penalty": 1.1}},
        {"eos_token_ids": (2,)},
        {"eos_token_ids": ()},
    ],
)
async def test_other_defaults_do_not_continue_a_stream(models: Models, defaults: dict[str, Any]) -> None:
    whole = request()
    received = await beginning(models, whole, 4)
    models.served = replace(models.served, defaults=GenerationDefaults(**{"eos_token_ids": (1,)} | defaults))
    async with models.open_scheduler() as scheduler:
        with pytest.raises(OtherModel, match="other defaults") as caught:
            await scheduler.messages(resumption(whole, received))
    assert status_of(caught.value).code.name == "FAILED_PRECONDITION"


async def test_defaults_of_fields_that_the_request_has_do_not_matter(models: Models) -> None:
    whole = request(temperature=0.0, n=2, seed=4)
    received = await beginning(models, whole, 4)
    models.served = replace(models.served, defaults=GenerationDefaults({"temperature": 0.5}, (1,), None, 3))
    async with models.open_scheduler() as scheduler:
        rest = await scheduler.messages(resumption(whole, received))
        assert content([*received, *rest]) == content(await scheduler.messages(whole))


async def test_a_continuation_of_an_older_server_names_no_parameters(models: Models) -> None:
    whole = request()
    asked = resumption(whole, await beginning(models, whole, 4))
    asked.resume.continuation.settings_digest = ""
    async with models.open_scheduler() as scheduler:
        assert await scheduler.messages(asked)


@pytest.mark.parametrize("sampling", [{}, BEAMS])
async def test_an_executor_with_other_weights_that_comes_during_the_replay_is_noticed(
    models: Models, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = request(**sampling)
    asked = resumption(whole, await beginning(models, whole, 4 if not sampling else 1))
    async with models.open_scheduler(max_backoff_s=0.02) as scheduler:
        replay = scheduler.intake._replays.replay

        async def replay_after_a_change(*args: Any) -> Any:
            scheduler.client.description = NEW_WEIGHTS
            scheduler.client.lose()
            await until(lambda: scheduler.engine.description.weights_digest == "new")
            return await replay(*args)

        monkeypatch.setattr(scheduler.intake._replays, "replay", replay_after_a_change)
        with pytest.raises(OtherModel, match="other weights"):
            await scheduler.messages(asked)
