"""Events that happen to a world from outside: machines, networks, clocks, operators and other schedulers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc

from quire.executor.v1 import executor_pb2 as pb
from quire.plan_stream import FEATURES, PROTOCOL_VERSION
from scheduler.core import ExecutorLost, ExecutorNotOurs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.simulation.world import World

Event = "Callable[[World], Awaitable[None]]"


async def kill(world: World) -> None:
    """The executor dies, and another process starts, perhaps with another pool."""
    host, random = world.host, world.random
    host.next_num_blocks = max(2, world.num_blocks - random.choice((0, 0, 3, 8))) if random.random() < 0.3 else None
    host.restart_s = random.choice((0.05, 0.5, 3.0))
    host.lose_process("the executor is killed")


async def bring_other_weights(world: World) -> None:
    world.host.next_digest = str(world.host.num_processes)
    await kill(world)


async def kill_often(world: World) -> None:
    for _ in range(world.random.randint(3, 9)):
        await kill(world)
        world.host.restart_s = 0.05
        await asyncio.sleep(world.random.uniform(0.05, 0.4))


async def hang(world: World) -> None:
    """The device computes nothing for a while, or never again."""
    duration_s = world.random.choice((0.1, 1.0, 3.0, 1e6))
    if world.host.process is not None:
        world.log(f"the device hangs for {duration_s} s")
        world.host.process.hung_until_s = world.now_s + duration_s


async def stall(world: World) -> None:
    duration_s = world.random.choice((0.05, 0.5, 3.0))
    world.log(f"the connection stalls for {duration_s} s")
    world.wire.stall(duration_s)


async def break_connection(world: World) -> None:
    world.log("the connection breaks")
    world.wire.break_calls(world.notices_s(), world.notices_s())


async def cut(world: World) -> None:
    """No connection is possible for a while; EMFILE looks like this too."""
    world.log("the connection is cut")
    world.wire.is_cut = True
    world.wire.break_calls(world.notices_s(), world.notices_s())
    await asyncio.sleep(world.random.choice((0.05, 1.0, 3.0)))
    world.wire.is_cut = False


async def jump(world: World) -> None:
    """The wall clock jumps; nothing may depend on it."""
    world.wall_jump_s += world.random.choice((-1e6, -3.0, 5.0, 1e7))


async def forget_prefixes(world: World) -> None:
    if world.engine.core is not None:
        world.engine.reset_prefix_cache()


async def drain_and_resume(world: World) -> None:
    number, since_s = len(world.oracles.drains_s), world.now_s
    world.oracles.drains_s.append((since_s, since_s + 1e6))
    draining = asyncio.create_task(world.engine.drain(), name="drain")
    await asyncio.wait([draining], timeout=0.3)
    world.engine.resume()
    draining.cancel()
    world.oracles.drains_s[number] = (since_s, world.now_s)


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


EVENTS = (
    kill,
    kill,
    kill_often,
    bring_other_weights,
    hang,
    hang,
    stall,
    break_connection,
    cut,
    jump,
    forget_prefixes,
    drain_and_resume,
    rival,
    attacker,
)


def draw_events(world: World) -> list[tuple[float, Callable[[World], Awaitable[None]]]]:
    """Returns what happens, with the times."""
    random = world.random
    return [(random.uniform(0, 1.5), random.choice(EVENTS)) for _ in range(random.choice((0, 1, 1, 2, 3, 4)))]
