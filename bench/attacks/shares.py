"""Fair shares on running services: tenants that are always backlogged, one of which sends far more than the others.

    python -m bench shares                  # eight tenants, one with a hundred times the requests

Reports the output tokens of each tenant, and Jain's index of fairness over them: (sum x)² / (n · sum x²), which is 1 if
all are equal and 1/n if one tenant gets everything. All other flags are those of `quire serve`.
"""

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.attacks.ordinary_requests import generate
from bench.attacks.tenant_keys import make_key
from bench.command_line import Parser, at_least
from bench.machine import describe_machine
from bench.report import save
from bench.server_process import quire_server
from quire.async_client import AsyncClient
from quire.errors import QuireError

_OUTPUT_TOKENS = 64
_WARM_UP_S = 5.0
_PAUSE_S = 0.05
_CLIENTS_PER_CONNECTION = 200
"""A server permits 256 streams on a connection; the requests of further ones would wait at the client, unseen."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Output tokens by tenant during the measurement, and Jain's index over them."""

    duration_s: float
    num_clients: dict[str, int]
    num_tokens: dict[str, int]
    jain_index: float


def jain_index(values: Sequence[float]) -> float:
    """Returns Jain's index of fairness (Jain, Chiu and Hawe, 1984); 0 if all values are 0."""
    total, squares = sum(values), sum(value * value for value in values)
    return total * total / (len(values) * squares) if squares else 0.0


async def measure(flags: Sequence[str], num_clients: dict[str, int], duration_s: float) -> Shares:
    """Runs the clients of all tenants for a time. Raises BenchError if a key cannot be made."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.json"
        keys = {tenant: make_key(tenant, path) for tenant in num_clients}
        async with quire_server(["--api-keys", str(path), *flags]) as server:
            counts: Counter[str] = Counter()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_clients(server.addresses["grpc"], keys[tenant], tenant, number, counts))
                    for tenant, number in num_clients.items()
                ]
                await asyncio.sleep(_WARM_UP_S)
                before = Counter(counts)
                await asyncio.sleep(duration_s)
                num_tokens = {tenant: counts[tenant] - before[tenant] for tenant in num_clients}
                for task in tasks:
                    task.cancel()
    return Shares(duration_s, num_clients, num_tokens, jain_index(list(num_tokens.values())))


async def _clients(address: str, key: str, tenant: str, number: int, counts: Counter[str]) -> None:
    async with asyncio.TaskGroup() as group:
        for first in range(0, number, _CLIENTS_PER_CONNECTION):
            seeds = range(first, min(number, first + _CLIENTS_PER_CONNECTION))
            group.create_task(_clients_of_connection(address, key, tenant, seeds, counts))


async def _clients_of_connection(address: str, key: str, tenant: str, seeds: range, counts: Counter[str]) -> None:
    async with AsyncClient(address, api_key=key, resume_timeout_s=0) as client, asyncio.TaskGroup() as group:
        for seed in seeds:
            group.create_task(_client(client, tenant, random.Random(f"{tenant} {seed}"), counts))


async def _client(client: AsyncClient, tenant: str, rng: random.Random, counts: Counter[str]) -> None:
    """Sends one request after the other, and counts each token as it arrives."""
    while True:
        try:
            async for num_tokens in generate(client, rng, _OUTPUT_TOKENS):
                counts[tenant] += num_tokens
        except QuireError:
            await asyncio.sleep(_PAUSE_S)


def main(arguments: Sequence[str]) -> None:
    parser = Parser("shares", __doc__)
    parser.add_argument("--tenants", type=at_least(2), default=8, help="number of tenants")
    parser.add_argument("--clients", type=at_least(1), default=16, help="clients of each tenant but the first")
    parser.add_argument("--times", type=at_least(1), default=100, help="requests of the first tenant, as a multiple")
    parser.add_argument("--duration-s", type=float, default=20.0)
    parser.add_argument("--json", type=Path, help="file of results")
    given, flags = parser.parse_known_args(arguments)
    num_clients = {f"tenant-{i}": given.clients * (given.times if i == 0 else 1) for i in range(given.tenants)}
    shares = asyncio.run(measure(flags, num_clients, given.duration_s))
    for tenant, num_tokens in shares.num_tokens.items():
        print(f"{tenant}: {shares.num_clients[tenant]} clients, {num_tokens} tokens")
    print(f"Jain's index: {shares.jain_index:.4f}")
    if given.json is not None:
        save(given.json, {"machine": describe_machine(None), "flags": flags, **asdict(shares)})
