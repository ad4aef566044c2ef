"""Routing by cost beside round robin: how many prompt tokens are found in a cache, and the tail of the first token.

    python -m bench routing                          # three replicas of the embedded model, three rounds of turns

Conversations of several groups begin with the prompt of their group; groups are chosen by Zipf's law, and the pools
are too small for the prompts of all. Each turn starts the replicas anew, so that no turn finds what another has cached.
All other flags are those of `quire serve`.
"""

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.command_line import Parser, at_least
from bench.load import closed_loop, quire_sender
from bench.machine import describe_machine
from bench.report import save
from bench.server_process import quire_server
from bench.trace import TraceRequest
from quire.async_client import AsyncClient

POLICIES = ("round-robin", "cost")
_FIRST_ID = 10  # lower ids are special tokens


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one turn: `num_shared` tokens of the group's prompt, `num_own` others, `num_output` answered."""

    num_clients: int = 12
    num_requests: int = 240
    num_groups: int = 18
    num_shared: int = 512
    num_own: int = 32
    num_output: int = 16
    skew: float = 0.9


@dataclass(frozen=True, slots=True)
class Turn:
    """The results under one policy. hit_rate: part of the prompt tokens that were found in a cache."""

    hit_rate: float
    ttft_ms: float
    ttft_p99_ms: float
    tokens_per_s: float


def trace(load: Load, vocab_size: int, seed: int) -> list[TraceRequest]:
    """Returns the requests, which the seed determines."""
    rng = random.Random(seed)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(_FIRST_ID, vocab_size) for _ in range(number))

    groups = [ids(load.num_shared) for _ in range(load.num_groups)]
    weights = [1 / (rank + 1) ** load.skew for rank in range(load.num_groups)]
    chosen = rng.choices(groups, weights, k=load.num_requests)
    return [TraceRequest(group + ids(load.num_own), load.num_output) for group in chosen]


async def turn(policy: str, load: Load, flags: Sequence[str], num_replicas: int, seed: int) -> Turn:
    """Starts the replicas, sends the requests, and ends the replicas. Raises LoadError and ServerFailed."""
    replicas = ("--gateway", "--gateway-listen", "127.0.0.1:0", "--replicas", str(num_replicas), "--routing", policy)
    addresses = ("--executor", f"unix:/tmp/quire-routing-{seed}-{policy}.sock")
    async with (
        quire_server([*replicas, *addresses, *flags]) as server,
        AsyncClient(server.addresses["grpc"], wait_for_ready=True) as client,
    ):
        info = await client.server_info()
        result = await closed_loop(quire_sender(client), trace(load, info.vocab_size, seed), load.num_clients)
    ttft_ms = sorted(1e3 * record.ttft_s for record in result.records)
    num_prompt = sum(record.num_prompt_tokens for record in result.records)
    return Turn(
        hit_rate=(result.num_cached_tokens or 0) / num_prompt,
        ttft_ms=statistics.median(ttft_ms),
        ttft_p99_ms=ttft_ms[min(len(ttft_ms) - 1, int(0.99 * len(ttft_ms)))],
        tokens_per_s=sum(record.num_output_tokens for record in result.records) / result.wall_s,
    )


def main(arguments: Sequence[str]) -> None:
    defaults = Load()
    parser = Parser("routing", __doc__)
    parser.add_argument("--replicas", type=at_least(2), default=3)
    parser.add_argument("--clients", type=at_least(1), default=defaults.num_clients)
    parser.add_argument("--requests", type=at_least(1), default=defaults.num_requests, help="requests of each turn")
    parser.add_argument("--groups", type=at_least(1), default=defaults.num_groups)
    parser.add_argument("--shared", type=at_least(1), default=defaults.num_shared, help="tokens of a group's prompt")
    parser.add_argument("--policies", default=",".join(POLICIES), help="in turns, with commas between them")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--json", type=Path, help="file of results")
    given, flags = parser.parse_known_args(arguments)
    load = Load(given.clients, given.requests, given.groups, given.shared)
    if "--num-blocks" not in flags:  # enough for what runs, and for a third of the groups' prompts
        flags += ["--num-blocks", str(1 + (given.shared // 16) * (given.groups // 3 + given.clients))]
    policies = given.policies.split(",")
    turns: dict[str, list[Turn]] = {policy: [] for policy in policies}
    for number in range(1, given.rounds + 1):
        for policy in policies if number % 2 else policies[::-1]:
            found = asyncio.run(turn(policy, load, flags, given.replicas, number))
            turns[policy].append(found)
            print(
                f"round {number}, {policy}: {found.hit_rate:.1%} cached, first token {found.ttft_ms:.0f} ms,"
                f" p99 {found.ttft_p99_ms:.0f} ms, {found.tokens_per_s:,.0f} tokens/s"
            )
    medians = {policy: _median(each) for policy, each in turns.items()}
    for policy, each in medians.items():
        print(f"{policy}: {each.hit_rate:.1%} cached, first token {each.ttft_ms:.0f} ms, p99 {each.ttft_p99_ms:.0f} ms")
    if given.json is not None:
        save(
            given.json,
            {
                "machine": describe_machine(None),
                "replicas": given.replicas,
                **asdict(load),
                "medians": {policy: asdict(each) for policy, each in medians.items()},
                "rounds": {policy: [asdict(each) for each in found] for policy, found in turns.items()},
            },
        )


def _median(turns: Sequence[Turn]) -> Turn:
    values = [asdict(each) for each in turns]
    return Turn(**{name: statistics.median(each[name] for each in values) for name in values[0]})
