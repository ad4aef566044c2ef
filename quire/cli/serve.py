"""`quire serve`: all services, supervised, until a signal ends them."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import NoReturn

from gateway.config import GatewayConfig
from quire.cli import exit_codes
from quire.cli.child import LogSink
from quire.cli.replicas import ReplicatedServices
from quire.cli.restarts import RestartPolicy
from quire.cli.services import ServicePair
from quire.cli.supervisor import Supervisor
from quire.cli.upgrade import Upgrade
from quire.cli.watch import PROBE_TIMEOUT_S, Probe, handshake_probe, health_probe, liveness_probe, replace_when_hung
from quire.signals import end_signals

_SCHEDULER_SILENT_S = 20.0
"""The liveness of scheduler and gateway does not depend on their work, so they are killed sooner than an executor."""

# Only a configuration, an address in use, and a command that cannot be executed (126, 127) stay as they are.
_POLICY = RestartPolicy(fatal_at_start=frozenset({exit_codes.USAGE, exit_codes.ADDRESS_IN_USE, 126, 127}))
# Signalling a process and its group, as timeout(1) and some shells do, delivers one signal twice.
_SAME_SIGNAL_S = 0.5


async def serve(services: ServicePair | ReplicatedServices, say: Callable[[str], None], log: LogSink) -> int:
    """Runs all services until SIGTERM, SIGINT or SIGHUP; returns the exit code.

    The first signal drains: running requests finish, new ones are refused. A second signal kills, unless it is SIGHUP.
    Until then, a service that ends or hangs is restarted, however often. SIGUSR2 replaces the executor and the
    scheduler of each replica in turn, and then the gateway, so that they run the version that is installed now. Raises
    ChildFailed if a service refuses its configuration or finds its address in use before the first `ready`.

    say  called once with the line `ready …`, as soon as a completion can be generated
    """
    told_to_stop = asyncio.Event()
    supervisor = Supervisor(services.children(), log=log, policy=_POLICY)
    upgrade = Upgrade(supervisor)
    with _signals(told_to_stop, supervisor, upgrade, log):
        async with supervisor:
            watch = asyncio.create_task(_watch(supervisor, upgrade, services))
            life = asyncio.create_task(_live(supervisor, services, say))
            stop = asyncio.create_task(told_to_stop.wait())
            try:
                await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
                stop.cancel()
                if life.done():
                    life.result()
                life.cancel()
                exits = await supervisor.stop()
            finally:
                watch.cancel()
    for ended in exits:
        log("supervisor", str(ended))
    return exit_codes.OK if all(ended.ended_well for ended in exits) else exit_codes.FAILED


async def _live(
    supervisor: Supervisor, services: ServicePair | ReplicatedServices, say: Callable[[str], None]
) -> NoReturn:
    async with AsyncExitStack() as probing:
        # The admin socket answers without a key and without TLS.
        probes = [await probing.enter_async_context(health_probe(pair.admin_address)) for pair in services.replicas]
        if services.gateway is not None:
            probes.append(gateway_probe(services.gateway))

        async def are_ready() -> bool:
            return all(await asyncio.gather(*(probe(PROBE_TIMEOUT_S) for probe in probes)))

        await supervisor.until_ready(are_ready)
    say(services.ready_line())
    raise await supervisor.failure()


async def _watch(supervisor: Supervisor, upgrade: Upgrade, services: ServicePair | ReplicatedServices) -> None:
    """Ends services that hang, and replaces all in turn on demand."""
    groups: list[dict[str, Probe]] = []
    watches = []
    async with AsyncExitStack() as probing:
        for pair in services.replicas:
            scheduler, executor = f"scheduler{pair.suffix}", f"executor{pair.suffix}"
            executes = await probing.enter_async_context(health_probe(pair.executor.listen_address))
            schedules = await probing.enter_async_context(health_probe(pair.admin_address))
            # A scheduler with others beside it hands its streams over, so its executor can end at the same time. One
            # that is alone keeps its streams until they end, and meanwhile gets a new executor.
            is_alone = len(services.replicas) == 1
            groups += (
                [{executor: executes}, {scheduler: schedules}]
                if is_alone
                else [{scheduler: schedules, executor: executes}]
            )
            silent_s = min(_SCHEDULER_SILENT_S, pair.scheduler.step_timeout_s)
            step_timeout_s, load_timeout_s = pair.executor.step_timeout_s, pair.executor.load_timeout_s
            is_alive = liveness_probe(pair.scheduler.http_listen)
            watches += [
                replace_when_hung(supervisor, scheduler, is_alive, silent_s, load_timeout_s),
                replace_when_hung(supervisor, executor, executes, step_timeout_s, load_timeout_s),
            ]
        if services.gateway is not None:
            is_alive = gateway_probe(services.gateway)
            groups.append({"gateway": is_alive})
            watches.append(replace_when_hung(supervisor, "gateway", is_alive, _SCHEDULER_SILENT_S, load_timeout_s))
        await asyncio.gather(*watches, upgrade.run(groups))


def gateway_probe(gateway: GatewayConfig) -> Probe:
    """Returns a function that says whether the gateway's event loop runs."""
    probe = liveness_probe if gateway.tls_certificate is None else handshake_probe
    return probe(gateway.listen)


@contextmanager
def _signals(told_to_stop: asyncio.Event, supervisor: Supervisor, upgrade: Upgrade, log: LogSink) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    first_s = 0.0

    def on_signal(number: signal.Signals) -> None:
        nonlocal first_s
        if not told_to_stop.is_set():
            first_s = loop.time()
            told_to_stop.set()
            log("supervisor", "draining; a second signal kills all services")
        elif number is not signal.SIGHUP and loop.time() - first_s > _SAME_SIGNAL_S:
            supervisor.kill()
            log("supervisor", "killing all services")

    def on_upgrade() -> None:
        log("supervisor", "replacing all services, one after the other; a second signal breaks off streams")
        upgrade.ask()

    numbers = end_signals()
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGUSR2, on_upgrade)
    try:
        yield
    finally:
        for number in (*numbers, signal.SIGUSR2):
            loop.remove_signal_handler(number)
