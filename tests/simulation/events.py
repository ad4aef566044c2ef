"""Events that happen to a world from outside: machines, networks, clocks, operators and other schedulers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.simulation.rivals import attacker, foreign_publisher, rival

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.simulation.world import World

Event = "Callable[[World], Awaitable[None]]"


async def kill(world: World) -> None:
    """The executor dies, and another process starts, perhaps with another pool."""
    host, random = world.host, world.random
    host.next_num_blocks = max(2, world.num_blocks - random.choice((0, 0, 3, 8))) if random.random() < 0.3 else None
    host.load_s = random.choice((0.0, 0.3, 3.0))
    host.lose_process("the executor is killed")


async def bring_other_weights(world: World) -> None:
    world.host.next_digest = str(world.host.num_processes)
    await kill(world)


async def kill_often(world: World) -> None:
    """Executors die young: as soon as each serves, or even before."""
    for _ in range(world.random.randint(3, 9)):
        await kill(world)
        world.host.load_s = 0.0
        await asyncio.sleep(world.random.uniform(0.05, 0.4))
        while world.host.process is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def kill_scheduler(world: World) -> None:
    """The scheduler dies, and another process takes the executor with the blocks that it has retained."""
    world.schedulers.load_s = world.random.choice((0.0, 0.1, 2.0))
    world.schedulers.lose_process("the scheduler is killed")


async def kill_scheduler_often(world: World) -> None:
    for _ in range(world.random.randint(2, 5)):
        await kill_scheduler(world)
        await asyncio.sleep(world.random.uniform(0.0, 0.6))


async def kill_both(world: World) -> None:
    await asyncio.gather(kill(world), kill_scheduler(world))


async def stop_scheduler(world: World) -> None:
    """The scheduler is stopped for a while, or for ever; its supervisor may lose its patience."""
    duration_s = world.random.choice((0.1, 1.0, 5.0, 1e6))
    if (process := world.scheduler) is not None:
        world.log(f"the scheduler is stopped for {duration_s} s")
        process.is_stopped = world.oracles.has_stopped_schedulers = True
        await asyncio.sleep(min(duration_s, 30.0))
        if duration_s < 1e6 and process.is_alive:
            world.log("the scheduler goes on")
            process.go_on()


async def break_client(world: World) -> None:
    """The connection of a client breaks, and the server notices it later than the client."""
    if (process := world.scheduler) is not None and process.calls:
        call = world.random.choice(list(process.calls))
        world.log(f"the connection of {call.peer()} breaks")
        call.break_off(world.notices_s())


async def hang(world: World) -> None:
    """The device computes nothing for a while, or never again."""
    duration_s = world.random.choice((0.1, 1.0, 3.0, 1e6))
    if world.host.process is not None:
        world.log(f"the device hangs for {duration_s} s")
        world.host.process.hung_until_s = world.now_s + duration_s


async def stall(world: World) -> None:
    duration_s = world.random.choice((0.05, 0.5, 3.0))
    if (process := world.scheduler) is not None:
        world.log(f"the connection stalls for {duration_s} s")
        process.wire.stall(duration_s)


async def break_connection(world: World) -> None:
    if (process := world.scheduler) is not None:
        world.log("the connection breaks")
        process.wire.break_calls(world.notices_s(), world.notices_s())


async def cut(world: World) -> None:
    """No connection is possible for a while; EMFILE looks like this too."""
    if (process := world.scheduler) is not None:
        world.log("the connection is cut")
        process.wire.is_cut = True
        process.wire.break_calls(world.notices_s(), world.notices_s())
        await asyncio.sleep(world.random.choice((0.05, 1.0, 3.0)))
        process.wire.is_cut = not process.is_alive


async def jump(world: World) -> None:
    """The wall clock jumps; nothing may depend on it."""
    world.wall_jump_s += world.random.choice((-1e6, -3.0, 5.0, 1e7))


async def forget_prefixes(world: World) -> None:
    if (process := world.scheduler) is not None and not process.is_stopped:
        world.log("the prefix cache is reset")
        world.oracles.cache.reset(process.engine)


async def drain_and_resume(world: World) -> None:
    if (process := world.scheduler) is None or process.is_stopped:
        return
    number, since_s = len(world.oracles.drains_s), world.now_s
    world.oracles.drains_s.append((since_s, since_s + 1e6))
    draining = asyncio.create_task(process.engine.drain(), name="drain")
    await asyncio.wait([draining], timeout=0.3)
    process.engine.resume()
    draining.cancel()
    world.oracles.drains_s[number] = (since_s, world.now_s)


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
    kill_scheduler,
    kill_scheduler,
    kill_scheduler_often,
    kill_both,
    stop_scheduler,
    break_client,
    break_client,
    drain_and_resume,
    rival,
    attacker,
    foreign_publisher,
    foreign_publisher,
)


def draw_events(world: World) -> list[tuple[float, Callable[[World], Awaitable[None]]]]:
    """Returns what happens, with the times."""
    random = world.random
    return [(random.uniform(0, 1.5), random.choice(EVENTS)) for _ in range(random.choice((0, 1, 1, 2, 3, 4)))]
