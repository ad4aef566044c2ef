"""The process of one attack, at the lowest priority, so that the server is measured and not the cores.

python -m bench attacker rapid-reset --grpc 127.0.0.1:50051 --http 127.0.0.1:8080 --duration-s 8
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from bench.attacks.attacks import ATTACKS, run
from bench.attacks.target import Target
from bench.command_line import Parser
from quire.command import API_KEY
from quire.descriptors import raise_descriptor_limit

_LOWEST_PRIORITY = 19


def main(arguments: Sequence[str]) -> None:
    parser = Parser("attacker", __doc__)
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("--grpc", required=True, help="address of the scheduler's gRPC server")
    parser.add_argument("--http", required=True, help="address of the scheduler's HTTP server")
    parser.add_argument("--duration-s", type=float, default=8.0)
    given = parser.parse_args(arguments)
    take_lowest_priority()
    raise_descriptor_limit()
    target = Target(given.grpc, given.http, os.environ.get(API_KEY))
    print("ready", flush=True)
    asyncio.run(run(given.attack, target, given.duration_s))


def take_lowest_priority(autogroup: Path = Path("/proc/self/autogroup")) -> None:
    """Gives this process and its session the lowest priority.

    Where Linux groups processes by session, each session gets the same share of the processor, and the niceness of a
    process counts within its session only (sched(7), "The autogroup feature"). So the session's niceness is set too.
    """
    os.nice(_LOWEST_PRIORITY)
    with contextlib.suppress(OSError):  # another system, or a kernel without autogroups
        autogroup.write_text(str(_LOWEST_PRIORITY))
