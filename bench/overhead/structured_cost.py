"""Throughput when every request follows a grammar, beside the same requests without one.

    python -m bench structured-cost                  # 64 clients on the embedded model, five rounds of turns

Both kinds run on one server in turns, with the same prompts and the same numbers of tokens: the texts of the schema are
longer than any output, so that every request ends at its length. There is no prefix cache, which would favour the
second turn of a round. The ratio is the median of the rounds' ratios. All other flags are those of `quire serve`.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.command_line import Parser
from bench.load import Send, closed_loop, quire_sender
from bench.machine import describe_machine
from bench.report import save
from bench.server_process import quire_server
from bench.trace import TraceSettings, make_trace
from quire.async_client import AsyncClient

SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["fox", "bear", "bee", "owl"]},
            "friends": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]+$"}, "maxItems": 3},
        },
        "required": ["name", "age", "kind", "friends"],
        "additionalProperties": False,
    },
}
"""A list of so many objects that no output reaches its end."""


@dataclass(frozen=True, slots=True)
class Round:
    """Output tokens a second of each kind, in one pair of turns."""

    plain: float
    structured: float

    @property
    def ratio(self) -> float:
        return self.structured / self.plain


async def measure(flags: Sequence[str], num_clients: int, num_requests: int, num_rounds: int) -> list[Round]:
    """Measures both kinds in turns, after a turn of each that is not counted. Raises LoadError and ServerFailed."""
    async with (
        quire_server(["--no-enable-prefix-caching", *flags]) as server,
        AsyncClient(server.addresses["grpc"], resume_timeout_s=0) as client,
    ):
        info = await client.server_info()
        plain, structured = quire_sender(client), quire_sender(client, SCHEMA)

        async def rate(send: Send, seed: int) -> float:
            settings = TraceSettings(num_requests, info.vocab_size, info.max_model_len, seed=seed)
            result = await closed_loop(send, make_trace(settings), num_clients)
            return sum(record.num_output_tokens for record in result.records) / result.wall_s

        for send in (plain, structured):
            await rate(send, 0)
        rounds = []
        for seed in range(1, num_rounds + 1):
            if seed % 2:
                first = await rate(plain, seed)
                rounds.append(Round(first, await rate(structured, seed)))
            else:
                first = await rate(structured, seed)
                rounds.append(Round(await rate(plain, seed), first))
        return rounds


def main(arguments: Sequence[str]) -> None:
    parser = Parser("structured-cost", __doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256, help="requests of each turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file of results")
    given, flags = parser.parse_known_args(arguments)
    rounds = asyncio.run(measure(flags, given.clients, given.requests, given.rounds))
    for number, each in enumerate(rounds, 1):
        print(f"round {number}: {each.plain:,.0f} plain, {each.structured:,.0f} structured, {each.ratio:.1%}")
    ratio = statistics.median(each.ratio for each in rounds)
    print(f"throughput with a grammar in all {given.clients} clients: {ratio:.1%} of that without (median)")
    if given.json is not None:
        machine = describe_machine(None)
        save(given.json, {"machine": machine, "ratio": ratio, "rounds": [asdict(each) for each in rounds]})
