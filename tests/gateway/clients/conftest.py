from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI, OpenAI

from quire import AsyncClient, Client
from tests.support.e2e.block_maps import is_idle, until_map
from tests.support.e2e.stack import Stack
from tests.support.gateway.served import KEY, served


@pytest.fixture(scope="package")
def served_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with served(tmp_path_factory.mktemp("model")) as stack:
        yield stack


@pytest.fixture
def stack(served_stack: Stack) -> Stack:
    """Returns `quire serve` with its gateway; its log is shown if the test fails."""
    served_stack.show_log()
    return served_stack


@pytest.fixture
def openai(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{stack.openai}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def openai_async(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://{stack.openai}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def quire(stack: Stack) -> Iterator[Client]:
    """Yields a client of the scheduler's own protocol, to compare with."""
    with stack.sync_client() as client:
        yield client


@pytest.fixture
async def observer(stack: Stack) -> AsyncIterator[AsyncClient]:
    """Yields a client of the scheduler; checks afterwards that the test has left no request behind."""
    async with stack.client() as client:
        yield client
        await until_map(client, is_idle)
