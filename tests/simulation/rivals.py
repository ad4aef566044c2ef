"""Other peers of the executor: schedulers that want it too, and an attacker."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc

from quire.executor.v1 import executor_pb2 as pb
from quire.plan_stream import FEATURES, PROTOCOL_VERSION
from scheduler.core import Admission, ExecutorLost, ExecutorNotOurs, SequenceParams, StepPlan
from scheduler.core.prefix_index import PrefixIndex
from scheduler.requests.salts import tenant_salt
from tests.simulation.requests import HEAD, tenant_of

if TYPE_CHECKING:
    from tests.simulation.world import World


async def rival(world: World) -> None:
    """Another scheduler wants the executor, takes it perhaps, and ends."""
    takes_over, holds_s = world.random.random() < 0.5, world.random.choice((0.0, 0.3, 2.0))
    wire = world.new_wire("rival")
    client = world.new_client(wire, "rival", takes_over=takes_over)
    for _ in range(3):
        with suppress(ExecutorLost, ExecutorNotOurs):
            description = await client.describe(1.0)
            stream = await client.open_stream(lambda: None, 1, description.incarnation, 1.0)
            await asyncio.sleep(holds_s)
            await stream.close()
            break
        await asyncio.sleep(0.1)
    world.wires.remove(wire)


async def attacker(world: World) -> None:
    """A peer that keeps no rule: it takes the executor, and sends plans of its own choice."""
    random = world.random
    wire = world.new_wire("attacker")
    call = wire.begin_stream()
    opening = pb.Opening(protocol_version=PROTOCOL_VERSION, features=FEATURES, holder="attacker", takes_over=True)
    epochs = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
        if random.random() < 0.9:
            await call.write(pb.RunRequest(opening=opening))
        for step_id in range(1, random.randint(2, 4)):
            plan = pb.StepPlan(epoch=random.choice(epochs), step_id=step_id)
            world.log(f"the attacker sends a plan of epoch {plan.epoch}")
            await call.write(pb.RunRequest(plan=plan))
        await asyncio.sleep(random.choice((0.01, 0.3)))
    call.cancel()
    world.wires.remove(wire)


async def foreign_publisher(world: World) -> None:
    """A scheduler with another digest scheme, whose digests are those that ours gives to other texts."""
    machine, wire = world.machine, world.new_wire("foreign scheduler")
    num_blocks = min(3, machine.max_num_batched_tokens // machine.block_size)
    index, digests = PrefixIndex(machine.block_size, "hash"), []
    for number in range(num_blocks):
        digests += index.extend_chain([], HEAD, 1, tenant_salt(tenant_of(number), b""))
    text = [70] * (num_blocks * machine.block_size + 1)
    blocks = list(range(1, num_blocks + 2))
    admission = Admission(0, text, len(text), 0, blocks, SequenceParams(max_total_tokens=len(text) + 1))
    client = world.new_client(wire, "foreign scheduler", takes_over=world.random.random() < 0.7)
    for _ in range(3):
        with suppress(ExecutorLost, ExecutorNotOurs):
            description = await client.describe(1.0)
            stream = await client.open_stream(
                lambda: None, 1, description.incarnation, 1.0, digest_scheme="another", num_blocks=1000
            )
            with suppress(Exception):  # such as an error that was drawn for ours
                await stream.send(
                    StepPlan(1, 1, admissions=[admission], row_counts=[0, num_blocks * machine.block_size])
                )
                await stream.send(StepPlan(1, 2, row_counts=[0, 0], published=dict(zip(blocks, digests, strict=False))))
                await asyncio.sleep(0.3)
                world.log("a foreign scheduler has published blocks")
            await stream.close()
            break
        await asyncio.sleep(0.1)
    world.wires.remove(wire)
