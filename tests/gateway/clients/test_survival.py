"""Services that are killed under streams of the gateway cost its clients a pause: the texts are the same."""

import asyncio
import signal
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import OPENINGS
from tests.support.e2e.waiting import until
from tests.support.gateway.served import KEY, MODEL, served

NUM_STREAMS = 16
NUM_TOKENS = 1000  # most streams still run when a busy machine gets to the disturbance


def wanted(number: int) -> dict[str, Any]:
    """Returns one of several kinds of requests: greedy and sampled, one choice and two, with penalties and without."""
    fields: dict[str, Any] = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number, "n": 2}
    if number % 4 == 3:
        fields["frequency_penalty"] = 0.5
    return fields


class Streams:
    """Chats and completions that are streamed at the same time.

    texts  by the number of the stream and of the choice
    ended  the choices that have their reason
    """

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client
        self.texts: dict[tuple[int, int], str] = defaultdict(str)
        self.ended: dict[tuple[int, int], str] = {}
        self.tasks = [asyncio.create_task(self._read(number)) for number in range(NUM_STREAMS)]

    @property
    def num_running(self) -> int:
        return sum(not task.done() for task in self.tasks)

    async def all_have_begun(self) -> bool:
        failed = [task for task in self.tasks if task.done()]
        for task in failed:
            task.result()
        return len({number for number, _ in self.texts}) == NUM_STREAMS

    async def _read(self, number: int) -> None:
        opening = OPENINGS[number % len(OPENINGS)]
        fields = {"model": MODEL, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}} | wanted(number)
        stream: Any
        if number % 3:
            stream = await self._client.completions.create(prompt=opening, stream=True, **fields)
        else:
            messages: list[Any] = [{"role": "user", "content": opening}]
            stream = await self._client.chat.completions.create(messages=messages, stream=True, **fields)
        async for chunk in stream:
            (choice,) = chunk.choices
            assert (number, choice.index) not in self.ended
            text = choice.text if number % 3 else choice.delta.content
            if text:
                self.texts[number, choice.index] += text
            if choice.finish_reason:
                self.ended[number, choice.index] = choice.finish_reason


@pytest.fixture(scope="module")
def served_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with served(tmp_path_factory.mktemp("model"), max_num_seqs=64) as stack:
        yield stack


@pytest.mark.exhaustive
@pytest.mark.parametrize("service", ["executor", "scheduler"])
async def test_streams_survive_a_killed(served_stack: Stack, service: str) -> None:
    served_stack.show_log()
    url = f"http://{served_stack.openai}/v1"
    # By default it gives up connecting after five seconds, which is too short beside other tests.
    async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=300) as client:
        undisturbed = Streams(client)
        await asyncio.gather(*undisturbed.tasks)
        gateway = served_stack.pid("gateway")
        assert gateway is not None

        streams = Streams(client)
        await until(streams.all_have_begun, "all streams have text")
        killed = served_stack.send(service, signal.SIGKILL)
        assert streams.num_running > 0
        await asyncio.gather(*streams.tasks)
        assert streams.texts == undisturbed.texts
        assert streams.ended == undisturbed.ended
        assert set(streams.ended.values()) == {"length"}
        await until(lambda: served_stack.pid(service) not in (None, killed), "the service is replaced")
        assert served_stack.pid("gateway") == gateway
