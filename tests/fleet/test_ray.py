"""`quire fleet --backend ray` on a cluster of five nodes on this machine, with mTLS, TLS and keys on all hops.

Ray is not part of the environment of the tests: pip install 'quire[fleet]' for these.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from quire.addresses import with_port
from quire.cli import exit_codes
from tests.support.certificates import Authority
from tests.support.e2e.fleet import Fleet, answers, quire
from tests.support.e2e.process import is_running
from tests.support.e2e.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'quire[fleet]'")

NUM_STREAMS = int(os.environ.get("NUM_STREAMS", "8"))
NUM_TOKENS = 1500
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


class RayFleet(Fleet):
    """A fleet on a cluster: a head, a node for schedulers and gateways, and three for executors."""

    # The streams of a test fit in the pools, so that none is silent only because it waits for blocks.
    executor_flags = ("--num-blocks", "4096", "--num-threads", "1")

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        super().__init__("ray", cluster.address)

    def node_of(self, part: str) -> Any:
        """Returns the node whose raylet is the parent of a part's actor."""
        parents = {parent.pid for parent in psutil.Process(self.parts()[part]["pid"]).parents()}
        (node,) = [node for node in self.cluster.list_all_nodes() if _raylet(node) in parents]
        return node


def add_node(cluster: Any, **arguments: Any) -> None:
    """Adds a node; the first one is the head. Ray gives a node half a minute, which a busy machine may exceed."""
    for num_left in (3, 2, 1, 0):
        try:
            cluster.add_node(**arguments)
            return
        except Exception as error:  # Ray raises nothing more special
            if not num_left or "timed out during startup" not in str(error):
                raise


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("ray")
    key_file = folder / "keys.json"
    added = quire("keys", "add", "gateway", "--file", str(key_file), "--role", "generate", "--role", "observe")
    patch = pytest.MonkeyPatch()
    patch.setenv("QUIRE_API_KEY", added.stdout.strip())  # the nodes pass it on to the gateway
    patch.setenv("RAY_DEDUP_LOGS", "0")
    cluster = Cluster()
    try:
        add_node(cluster, num_cpus=1, include_dashboard=False, _system_config=HEALTH_CHECKS)
        add_node(cluster, num_cpus=5, resources={"for-schedulers": 1})
        for _ in range(3):
            add_node(cluster, num_cpus=1, resources={"for-executors": 1})
        fleet = RayFleet(cluster)
        with fleet:
            fleet.key = quire("keys", "add", "client", "--file", str(key_file), "--role", "generate").stdout.strip()
            fleet.up(2, *_flags(folder, key_file), gateway_listen=with_port("127.0.0.1:0"))
            yield fleet
    finally:
        ray.shutdown()
        cluster.shutdown()
        patch.undo()


def _flags(folder: Path, key_file: Path) -> list[str]:
    """Returns the flags that let no stranger in, at the network address of the nodes."""
    authority = Authority.create(folder)
    host = ray.util.get_node_ip_address()
    scheduler = authority.issue("scheduler", "DNS:scheduler.test", f"IP:{host}")
    executor = authority.issue("executor", "DNS:executor.test")
    return [
        *("--executor-resource", "for-executors", "--scheduler-resource", "for-schedulers"),
        "--scheduler-flags",
        f"--api-keys {key_file} --tls-certificate {scheduler.certificate} --tls-key {scheduler.key} "
        f"--executor-tls-ca {authority.ca} --executor-tls-certificate {scheduler.certificate} "
        f"--executor-tls-key {scheduler.key} --executor-name executor.test",
        "--gateway-flags",
        f"--scheduler-ca {authority.ca}",
        "--executor-flags",
        f"--tls-certificate {executor.certificate} --tls-key {executor.key} --tls-client-ca {authority.ca} "
        "--scheduler-name scheduler.test",
    ]


@pytest.fixture(scope="module")
def undisturbed(fleet: RayFleet) -> list[str]:
    found = asyncio.run(answers(fleet, NUM_STREAMS, NUM_TOKENS))
    print(f"undisturbed: longest silence {found.longest_silence_s:.2f} s in {NUM_STREAMS} streams")
    return found.texts


async def running(fleet: RayFleet) -> None:
    async def are_there() -> bool:
        parts = await asyncio.to_thread(fleet.parts)
        return any(part["num_requests"] for part in parts.values())

    await until(are_there, "requests have come")


@pytest.mark.parametrize("part", ["executor-0", "scheduler-0", "gateway-0", "controller"])
async def test_streams_survive_the_death_of_each_process(fleet: RayFleet, undisturbed: list[str], part: str) -> None:
    before = fleet.parts()
    streaming = asyncio.create_task(answers(fleet, NUM_STREAMS, NUM_TOKENS))
    await running(fleet)
    killed = await asyncio.to_thread(fleet.kill, part)
    found = await streaming
    assert found.texts == undisturbed
    print(f"{part}: longest silence {found.longest_silence_s:.2f} s in {NUM_STREAMS} streams")
    await until(lambda: _is_gone(killed), "the process is gone")
    await fleet.settled(2)
    after = fleet.parts()
    replaced = {name for name in after if after[name]["pid"] != before[name]["pid"]}
    assert replaced == ({part} if part in before else set())


async def test_streams_survive_the_death_of_a_node(fleet: RayFleet, undisturbed: list[str]) -> None:
    """The raylet and all its workers die at once; another node takes the executor."""
    executor = fleet.parts()["executor-1"]["pid"]
    node = fleet.node_of("executor-1")
    streaming = asyncio.create_task(answers(fleet, NUM_STREAMS, NUM_TOKENS))
    await running(fleet)
    await asyncio.to_thread(fleet.cluster.remove_node, node, allow_graceful=False)
    found = await streaming
    assert found.texts == undisturbed
    print(f"node: longest silence {found.longest_silence_s:.2f} s in {NUM_STREAMS} streams")
    await fleet.settled(2)
    await until(lambda: _is_gone(executor), "the executor ends with its node")
    add_node(fleet.cluster, num_cpus=1, resources={"for-executors": 1})


async def test_a_node_that_dies_without_a_controller_keeps_no_place(fleet: RayFleet) -> None:
    """Ray moves the place of the executor to the only node that is left, where the new executor has to go."""
    node = fleet.node_of("executor-1")
    controller = psutil.Process(fleet.status()["controller_pid"])
    controller.suspend()
    await asyncio.to_thread(fleet.cluster.remove_node, node, allow_graceful=False)
    await until(lambda: _is_given_up(node), "the head has given the node up")
    controller.kill()
    await fleet.settled(2)
    add_node(fleet.cluster, num_cpus=1, resources={"for-executors": 1})


async def test_streams_survive_the_death_of_a_rank(fleet: RayFleet) -> None:
    """A second fleet on the same cluster, whose executor is a group of two ranks."""
    with RayFleet(fleet.cluster) as divided:
        flags = ("--tensor-parallel-size", "2", *fleet.flags[2:])  # without --gateway-listen
        await asyncio.to_thread(divided.up, 1, *flags, gateway_listen=with_port("127.0.0.1:0"))
        divided.key = fleet.key
        expected = await answers(divided, NUM_STREAMS, NUM_TOKENS)
        executor = psutil.Process(divided.parts()["executor-0"]["pid"])
        (rank,) = executor.children()
        streaming = asyncio.create_task(answers(divided, NUM_STREAMS, NUM_TOKENS))
        await running(divided)
        rank.kill()
        found = await streaming
        assert found.texts == expected.texts
        silences = f"{found.longest_silence_s:.2f} s, undisturbed {expected.longest_silence_s:.2f} s"
        print(f"rank: longest silence {silences} in {NUM_STREAMS} streams")
        await until(lambda: _is_gone(executor.pid), "the executor ends with its rank")
        await divided.settled(1)


async def test_a_part_on_a_node_that_the_head_has_given_up_fences_itself(
    fleet: RayFleet, undisturbed: list[str]
) -> None:
    """The raylet is stopped, as if its machine could not be reached; the executor there still runs and answers."""
    orphan = fleet.parts()["executor-0"]["pid"]
    raylet = psutil.Process(_raylet(fleet.node_of("executor-0")))
    controller = fleet.status()["controller_pid"]
    streaming = asyncio.create_task(answers(fleet, NUM_STREAMS, NUM_TOKENS))
    await running(fleet)
    raylet.suspend()
    try:
        await until(lambda: _is_gone(orphan), "the orphan has ended itself")
        found = await streaming
        assert found.texts == undisturbed
        print(f"silent node: longest silence {found.longest_silence_s:.2f} s in {NUM_STREAMS} streams")
        await fleet.settled(2)
        if fleet.status()["controller_pid"] != controller:
            await until(lambda: _is_gone(controller), "a controller on the silent node ends, too")
    finally:
        raylet.resume()  # it finds out that it was given up, and ends
    add_node(fleet.cluster, num_cpus=1, resources={"for-executors": 1})


async def test_a_controller_whose_place_another_one_has_ends_before_it_acts(fleet: RayFleet) -> None:
    """A controller on a node that the head has given up can still run and reach the head."""
    from ray.experimental.internal_kv import _internal_kv_put

    from fleet.ray_control import store_key

    report, before = fleet.status(), fleet.parts()
    wanted = {"token": "of another one", "wanted": report["wanted"] | {"serving": [0]}}
    _internal_kv_put(store_key(fleet.name), json.dumps(wanted).encode(), overwrite=True)
    await until(lambda: _is_gone(report["controller_pid"]), "the controller ends")
    await fleet.settled(1)
    assert {part: each["pid"] for part, each in fleet.parts().items()} == {
        part: before[part]["pid"] for part in ("executor-0", "scheduler-0", "gateway-0")
    }
    await asyncio.to_thread(fleet.run, "scale", "--replicas", "2")
    await fleet.settled(2)


async def test_a_drained_replica_gives_its_streams_away(fleet: RayFleet, undisturbed: list[str]) -> None:
    streaming = asyncio.create_task(answers(fleet, NUM_STREAMS, NUM_TOKENS))
    await running(fleet)
    await asyncio.to_thread(fleet.run, "drain", "0")
    found = await streaming
    assert found.texts == undisturbed

    async def has_ended() -> bool:
        return set(await asyncio.to_thread(fleet.parts)) == {"executor-1", "scheduler-1", "gateway-0"}

    await until(has_ended, "the drained replica has ended")
    await asyncio.to_thread(fleet.run, "scale", "--replicas", "2")
    await fleet.settled(2)


def test_flags_without_identity_are_refused_by_name() -> None:
    """Executors and schedulers of a cluster listen at network addresses."""
    flags = ("--name", "strangers", "--backend", "ray")
    done = quire("fleet", "up", *flags)
    assert done.returncode == exit_codes.USAGE
    assert "--executor-flags" in done.stderr
    assert "--tls-certificate" in done.stderr


def test_more_gpus_than_a_node_has_are_refused(fleet: RayFleet) -> None:
    done = fleet.run("up", *fleet.flags, "--num-gpus", "1", "--name", "other", check=False)
    assert done.returncode == exit_codes.FAILED
    assert "GPUs" in done.stderr


def test_down_leaves_nothing(fleet: RayFleet) -> None:
    pids = [part["pid"] for part in fleet.parts().values()]
    fleet.run("down", "--timeout-s", "30")
    assert not any(map(is_running, pids))
    assert "no fleet" in fleet.run("status", check=False).stderr
    assert ray.util.list_named_actors(all_namespaces=True) == []


async def _is_given_up(node: Any) -> bool:
    return any(each["NodeID"] == node.node_id and not each["Alive"] for each in ray.nodes())


async def _is_gone(pid: int) -> bool:
    return not is_running(pid)
