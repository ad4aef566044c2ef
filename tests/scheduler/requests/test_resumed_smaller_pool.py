"""A smaller pool ends a sequence after its last token was sent: its client still gets all text, and gets it once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest

from quire.v1 import generation_pb2 as pb
from scheduler.core import StepResult
from scheduler.requests.request_fields import RequestFields
from scheduler.servers.generation_server import read_fields
from scheduler.telemetry.request_observer import Caller
from scheduler.text.checkpoint import Checkpoint
from tests.support.scheduler.broken_streams import MODEL, Messages, Models, content, resumption
from tests.support.scheduler.fake_client import FakeClient
from tests.support.waiting import until

ENDINGS = {"stop string": [chr(place) + "\x00" for place in range(97, 113)], "character": []}
"""Stop strings by why text is held back: it may become one of these, or it is the beginning of a character."""


@pytest.fixture
async def models(checkpoint: Checkpoint) -> AsyncIterator[Models]:
    models = Models(checkpoint)
    yield models
    await models.close()


def request(num_prompt_tokens: int, seed: int, stop: Sequence[str]) -> pb.GenerateRequest:
    """Returns an open-ended request: the pool bounds its length."""
    token_ids = pb.TokenIds(ids=range(20, 20 + num_prompt_tokens))
    stopping = pb.StoppingParams(ignore_eos=True, stop=stop)
    return pb.GenerateRequest(resumable=True, token_ids=token_ids, sampling={"seed": seed}, stopping=stopping)


async def ended_by_a_smaller_pool(models: Models, whole: pb.GenerateRequest) -> tuple[Messages, int]:
    """Returns the messages of a stream whose sequence is as long as its new pool allows or longer, and the size of
    that pool."""
    received: Messages = []

    async def read(fields: RequestFields) -> None:
        async with scheduler.intake.open(fields, Caller(), None) as stream:
            async for message in stream.messages():
                received.append(message)

    async with models.open_scheduler() as scheduler:
        scheduler.client.alter = hang_after(12, scheduler.client)
        reading = asyncio.create_task(read(read_fields(whole)))
        await until(lambda: scheduler.client.is_hanging)
        for _ in range(50):  # the plans in flight are answered, and the reader receives everything
            await asyncio.sleep(0)
        num_tokens = len(whole.token_ids.ids) + len(token_ids_of(received))
        num_blocks = 1 + (num_tokens - 1) // MODEL.block_size
        scheduler.client.description = replace(MODEL, num_blocks=num_blocks)
        scheduler.client.is_hanging = False
        scheduler.client.lose()
        await asyncio.wait_for(reading, 20)
    return received, num_blocks


def hang_after(num_results: int, client: FakeClient) -> Callable[[StepResult], StepResult]:
    """Returns a function that lets this many results pass before the executor answers no further plan."""
    numbers = iter(range(1, 1000))

    def passed(result: StepResult) -> StepResult:
        client.is_hanging = client.is_hanging or next(numbers) == num_results
        return result

    return passed


def token_ids_of(messages: Messages) -> list[int]:
    return [token_id for message in messages for token_id in message.delta.token_ids]


@pytest.mark.parametrize("ending", ENDINGS)
async def test_held_back_text_is_sent_once_wherever_the_stream_continues(models: Models, ending: str) -> None:
    num_checked = {"at the bound": 0, "beyond it": 0}
    for number in range(100):
        num_prompt_tokens = 5 + number % 4
        whole = request(num_prompt_tokens, number, ENDINGS[ending])
        received, num_blocks = await ended_by_a_smaller_pool(models, whole)
        *deltas, text, _ = received
        if text.delta.token_ids:
            continue  # no text was held back
        async with models.open_scheduler() as scheduler:
            longer = content(await scheduler.messages(whole))
        bound = (num_blocks - 1) * MODEL.block_size + 1
        num_tokens = num_prompt_tokens + len(token_ids_of(received))
        num_checked["at the bound" if num_tokens == bound else "beyond it"] += 1
        for cut in (deltas, [*deltas, text], received):
            asked = resumption(whole, cut)
            async with models.open_scheduler(replace(MODEL, num_blocks=num_blocks)) as scheduler:
                assert content([*cut, *await scheduler.messages(asked)]) == content(received)
            async with models.open_scheduler() as scheduler:  # a larger pool, where it could be longer
                has_text = cut is not deltas
                assert content([*cut, *await scheduler.messages(asked)]) == (content(received) if has_text else longer)
        if min(num_checked.values()) >= 1:
            return
    pytest.fail(f"text should be held back at the end of some sequences: {num_checked}")
