"""Counts the blocks that sharing saves, in the block tables of a running server.

Without sharing, every entry of a block table would be a block of its own, so the number of entries is the number of
blocks in use. With sharing, each block that the tables name counts once. Both are read from the same block map, at
moments spread over the decode. One request (or group) runs at a time, with a new prompt, so everything that is shared
is shared within it.
"""

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from bench.load import LoadError
from bench.sharing.cases import Case, Mode
from quire.async_client import AsyncClient
from quire.block_map import BlockMap, ServerInfo
from quire.events import Event, Finished

_SAMPLE_INTERVAL_S = 0.005
_MAX_ATTEMPTS = 10
"""A request of a few tokens can end before its block map is read. Then it is sent again."""


@dataclass(frozen=True, slots=True)
class SharingSettings:
    """The cases of a measurement and their size.

    num_requests       requests of each case (for a system prompt: groups of requests)
    seed               seed of all lengths and texts
    num_system_tokens  length of the common system prompt; shortened to half the model's context
    """

    cases: tuple[Case, ...]
    num_requests: int = 8
    seed: int = 7
    num_system_tokens: int = 341  # the longer prompt of section 6.4 of the paper


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one case, over all block maps that were read during its decodes.

    scale               factor on all lengths
    mean_unshared       blocks in use without sharing: entries of all block tables
    mean_blocks         blocks in use: distinct entries
    peak_unshared, peak_blocks      the same, at the moments when each was largest
    num_cow_copies      blocks copied because they were shared
    """

    case: Case
    num_requests: int
    scale: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    num_maps: int
    mean_unshared: float
    mean_blocks: float
    peak_unshared: int
    peak_blocks: int
    num_cow_copies: int

    @property
    def saved_ratio(self) -> float:
        """Blocks saved over blocks without sharing, time-averaged."""
        return 1 - self.mean_blocks / self.mean_unshared if self.mean_unshared else 0.0

    @property
    def peak_saved_ratio(self) -> float:
        return 1 - self.peak_blocks / self.peak_unshared if self.peak_unshared else 0.0


async def measure(address: str, settings: SharingSettings, console: Console) -> tuple[ServerInfo, list[CaseResult]]:
    """Measures all cases, one after the other. Raises LoadError and QuireError."""
    async with AsyncClient(address, resume_timeout_s=0) as client:
        info = await client.server_info()
        results = []
        for case in settings.cases:
            with console.status(f"{case.lengths.name}, {case.num_sharers} {case.mode}"):
                results.append(await _Runner(client, info, settings, case).run())
        return info, results


class _Runner:
    """Measures one case."""

    def __init__(self, client: AsyncClient, info: ServerInfo, settings: SharingSettings, case: Case) -> None:
        self._client = client
        self._settings = settings
        self._case = case
        self._rng = random.Random(f"{settings.seed} {case}")
        room = min(info.max_model_len, info.num_blocks * info.block_size // case.num_sharers)
        self._num_system_tokens = 0
        if case.mode is Mode.SYSTEM_PROMPT:
            self._num_system_tokens = min(settings.num_system_tokens, room // 2)
        self._room = room - self._num_system_tokens
        self._maps: list[BlockMap] = []
        self._lengths: list[tuple[int, int]] = []
        self._num_cow_copies = 0

    async def run(self) -> CaseResult:
        for _ in range(self._settings.num_requests):
            await self._one()
        shares = [block_map.sharing for block_map in self._maps]
        if not shares:
            raise LoadError(f"no decode of {self._case.num_sharers} {self._case.mode} was seen: the server is too fast")
        return CaseResult(
            case=self._case,
            num_requests=self._settings.num_requests,
            scale=self._case.lengths.scale(self._room),
            mean_prompt_tokens=_mean(prompt for prompt, _ in self._lengths),
            mean_output_tokens=_mean(output for _, output in self._lengths),
            num_maps=len(shares),
            mean_unshared=_mean(share.num_table_entries for share in shares),
            mean_blocks=_mean(share.num_blocks for share in shares),
            peak_unshared=max(share.num_table_entries for share in shares),
            peak_blocks=max(share.num_blocks for share in shares),
            num_cow_copies=self._num_cow_copies,
        )

    async def _one(self) -> None:
        """Runs one request of several sequences, or several requests behind one system prompt."""
        is_group = self._case.mode is Mode.SYSTEM_PROMPT
        system = await self._text(self._num_system_tokens) if is_group else []
        num_requests = self._case.num_sharers if is_group else 1
        lengths = [self._case.lengths.draw(self._rng, self._room) for _ in range(num_requests)]
        prompts = [system + await self._text(num_prompt_tokens) for num_prompt_tokens, _ in lengths]
        self._lengths += [(len(prompt), output) for prompt, (_, output) in zip(prompts, lengths, strict=True)]
        outputs = [output for _, output in lengths]
        num_seen = len(self._maps)
        for _ in range(_MAX_ATTEMPTS):
            # The cache holds the prompts from their generation, or from the previous attempt.
            await self._client.reset_prefix_cache()
            if is_group:
                # Caches the system prompt, as an earlier request would.
                await self._client.complete(system, max_tokens=1)
            num_copies = await self._watched(prompts, outputs)
            if len(self._maps) > num_seen:
                self._num_cow_copies += num_copies
                return

    async def _watched(self, prompts: list[list[int]], outputs: list[int]) -> int:
        """Sends the requests together and keeps the block maps of their decode. Returns the number of copied blocks."""
        is_group = self._case.mode is Mode.SYSTEM_PROMPT
        before = (await self._client.pool_summary()).num_cow_copies
        watching = asyncio.create_task(self._watch(min(2, len(prompts)) if is_group else self._case.num_sharers))
        try:
            await asyncio.gather(*(self._send(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)))
        finally:
            watching.cancel()
            await asyncio.wait({watching})
        if not watching.cancelled() and (error := watching.exception()) is not None:
            raise error
        return (await self._client.pool_summary()).num_cow_copies - before

    async def _send(self, prompt: Sequence[int], num_output_tokens: int) -> None:
        number = self._case.num_sharers
        options: dict[str, Any] = {"max_tokens": num_output_tokens, "ignore_eos": True}
        match self._case.mode:
            case Mode.SAMPLES:
                options |= {"n": number, "temperature": 1.0, "seed": self._rng.getrandbits(63)}
            case Mode.BEAMS:
                options |= {"beam_width": number, "n": number}
            case Mode.SYSTEM_PROMPT:
                options |= {"temperature": 1.0, "seed": self._rng.getrandbits(63)}
        num_ended = 0
        async with self._client.generate(prompt, **options) as events:
            async for event in events:
                num_ended += _is_full_length(event, num_output_tokens)
        if num_ended != (1 if self._case.mode is Mode.SYSTEM_PROMPT else number):
            raise LoadError(f"{num_ended} of {number} {self._case.mode} were generated in full length")

    async def _text(self, num_tokens: int) -> list[int]:
        """Returns a text of `num_tokens` tokens that the model writes."""
        if num_tokens == 0:
            return []
        options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 1.0}
        completion = await self._client.complete("Once upon a time", seed=self._rng.getrandbits(63), **options)
        return list(completion.token_ids)

    async def _watch(self, least: int) -> None:
        """Keeps block maps of decodes. In a group, two decoding requests suffice: some end before others begin."""
        while True:
            block_map = await self._client.block_map()
            if is_decode(block_map, least):
                self._maps.append(block_map)
            await asyncio.sleep(_SAMPLE_INTERVAL_S)


def is_decode(block_map: BlockMap, least: int) -> bool:
    """Returns True if at least `least` sequences run and each has generated a token."""
    sequences = block_map.sequences
    return len(sequences) >= least and all(each.num_tokens > each.num_prompt_tokens for each in sequences)


def _is_full_length(event: Event, num_output_tokens: int) -> bool:
    return isinstance(event, Finished) and event.usage.completion_tokens == num_output_tokens


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
