"""Ordinary requests: a short random prompt, which shares nothing with others, and a fixed number of output tokens."""

import random
from collections.abc import AsyncIterator

from quire.async_client import AsyncClient
from quire.events import Delta

PROMPT_TOKENS = 16


async def generate(
    client: AsyncClient, rng: random.Random, num_tokens: int, *, timeout_s: float | None = None
) -> AsyncIterator[int]:
    """Sends one request, and yields the number of tokens of each message. Raises QuireError if it fails."""
    prompt = [rng.randrange(10, 250) for _ in range(PROMPT_TOKENS)]
    events = client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, timeout_s=timeout_s)
    async with events:
        async for event in events:
            if isinstance(event, Delta):
                yield len(event.token_ids)
