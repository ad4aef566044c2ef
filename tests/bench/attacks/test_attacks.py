"""The attacks are sent as they are meant, and the measurements beside them run on real services."""

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.attacks import command, http2, overload, shares
from bench.attacks.attacks import ATTACKS, GENERATE, run
from bench.attacks.overload_clients import CUT_OFF, EXPIRED, IN_TIME, LATE, OUTPUT_TOKENS, REFUSED
from bench.attacks.shares import jain_index
from bench.attacks.target import Target
from bench.attacks.tenant_keys import make_key
from bench.attacks.victim import Experience, Sent, experience, live
from bench.command_line import BenchError
from quire import AsyncClient
from quire.descriptors import raise_descriptor_limit
from quire.v1 import generation_pb2
from tests.support.e2e.stack import Stack

SMALL = ["--num-blocks", "129", "--num-threads", "1"]
MAX_RSS_MIB = 1024


class Attacked(NamedTuple):
    """Services, and the keys of two tenants."""

    stack: Stack
    victim_key: str
    attacker_key: str


def test_frames_have_a_header_of_nine_bytes() -> None:
    for frame, kind, stream_id in (
        (http2.settings(), 4, 0),
        (http2.settings_acknowledged(), 4, 0),
        (http2.headers(5, http2.grpc_call("localhost:1", GENERATE, "key")), 1, 5),
        (http2.reset(5), 3, 5),
    ):
        length, found_kind, _, found_id = struct.unpack(">I", b"\0" + frame[:3])[0], frame[3], frame[4], frame[5:9]
        assert (length, found_kind, found_id) == (len(frame) - 9, kind, struct.pack(">I", stream_id))


def test_the_attacked_method_exists() -> None:
    service = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
    assert f"/{service.full_name}/{service.methods_by_name['Generate'].name}" == GENERATE


@pytest.mark.parametrize(("values", "index"), [([1, 1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([0, 0], 0.0), ([3, 1], 0.8)])
def test_jains_index(values: list[float], index: float) -> None:
    assert jain_index(values) == pytest.approx(index)


def test_one_long_stall_shows_in_the_longest_time_and_in_no_percentile() -> None:
    sent = [Sent(0.01 * i, 0.005) for i in range(500)] + [Sent(5.0, 8.0)]
    assert experience(sent) == Experience(501, {}, 5.0, 5.0, 8000.0)
    assert experience([]) == Experience(0, {}, None, None, None)


def test_a_victim_without_a_request_was_not_served() -> None:
    assert Experience(0, {}, None, None, None).served_ratio == 0.0
    assert Experience(3, {"TimeoutError": 1}, 1.0, 2.0, 2.0).served_ratio == 0.75


def test_a_long_step_is_met_more_often_than_a_short_one() -> None:
    assert command.met_percentile_99([]) is None
    assert command.met_percentile_99([1.0] * 980 + [20.0]) == 20.0, "a fiftieth of the time"
    assert command.met_percentile_99([1.0] * 9900 + [20.0]) == 1.0, "a five-hundredth of the time"


def test_an_unknown_attack_is_refused() -> None:
    with pytest.raises(BenchError, match="rapid-resets"):
        command.main(["--only", "rapid-resets"])


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_an_attack_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs with one attack, and before it with the one that only keeps the cores busy."""
    monkeypatch.setattr(command, "_ONSET_S", 1.0)
    monkeypatch.setattr(command, "_WARM_UP_S", 0.5)
    path = tmp_path / "attacks.json"
    command.main(["--only", "rapid-reset", "--duration-s", "1", "--num-requests", "5", "--json", str(path), *SMALL])
    (row,) = json.loads(path.read_text())["rows"]
    assert row["attack"] == "rapid-reset"
    assert row["alone"]["num_served"] > 0
    assert row["after"]["num_served"] > 0
    assert 0 < row["scheduler_rss_mib"] <= MAX_RSS_MIB


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Runs services for the attacks on them: starting them takes longer than an attack.

    What an attack leaves behind has to be harmless under the next one too.
    """
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    victim, attacker = (make_key(tenant, keys, "generate", "observe") for tenant in ("victim", "attacker"))
    with Stack(num_blocks=129, api_keys=str(keys)) as stack:
        yield Attacked(stack, victim, attacker)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("attack", [name for name in ATTACKS if name not in ("rapid-reset", "busy-cores")])
async def test_the_services_outlive_each_attack(attacked: Attacked, attack: str) -> None:
    """`test_an_attack_is_measured` runs the other two.

    The attacks run in this process, because an attacker's process has the lowest priority: beside other tests it may
    not get to send anything.
    """
    stack = attacked.stack
    stack.show_log()
    raise_descriptor_limit()
    services = {service: stack.pid(service) for service in ("scheduler", "executor")}
    target = Target(stack.grpc, stack.http, attacked.attacker_key)
    async with AsyncClient(stack.grpc, api_key=attacked.victim_key, resume_timeout_s=0) as client:
        async with command._largest_rss(stack.serve.pid) as rss:
            attacking = asyncio.create_task(run(attack, target, 1.5))
            await live(client, 1.0, num_requests=5)
            await attacking
            after = experience(await live(client, 0.5, num_requests=5))
    assert after.num_served > 0
    assert 0 < rss() <= MAX_RSS_MIB << 20
    assert {service: stack.pid(service) for service in services} == services


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_every_tenant_is_served_beside_one_that_sends_far_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_WARM_UP_S", 1.0)
    path = tmp_path / "shares.json"
    flags = ["--tenants", "3", "--clients", "2", "--times", "20", "--duration-s", "3"]
    shares.main([*flags, "--json", str(path), *SMALL, "--max-num-seqs", "4"])
    report = json.loads(path.read_text())
    assert report["num_clients"] == {"tenant-0": 40, "tenant-1": 2, "tenant-2": 2}
    assert all(report["num_tokens"].values())
    assert 1 / 3 < report["jain_index"] <= 1  # on busy cores, so few clients do not keep a queue of their tenant


@pytest.mark.parametrize(
    "flags", [["--duration-s", "0"], ["--duration-s", "21"], ["--times", "0"], ["--deadline-s", "-1"]]
)
def test_an_overload_without_bounds_is_refused(flags: list[str]) -> None:
    with pytest.raises(BenchError, match="must be positive"):
        overload.main(flags)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_each_request_under_overload_has_one_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "_LOWEST_PRIORITY", 0)  # at the lowest, clients may not run at all beside other tests
    path = tmp_path / "overload.json"
    flags = ["--times", "3", "--clients", "8", "--duration-s", "2", "--deadline-s", "2", "--rounds", "1"]
    overload.main([*flags, "--json", str(path), *SMALL, "--max-num-seqs", "4"])
    (only,) = (report := json.loads(path.read_text()))["rounds"]
    without, under = only["without"], only["under"]
    capacity, outcomes = without["tally"]["num_tokens"] / 2, under["tally"]["outcomes"]
    assert only["offered"] == pytest.approx(3 * capacity)
    assert sum(outcomes.values()) == under["tally"]["num_sent"]
    assert outcomes.keys() <= {IN_TIME, LATE, REFUSED, EXPIRED, CUT_OFF}  # on busy cores, perhaps none is in time
    assert report["ratios"]["the clients"] == [under["tally"]["num_tokens"] / without["tally"]["num_tokens"]]
    assert without["ended"].keys() <= {"length"}  # on busy cores, perhaps none ends in two seconds
    assert without["num_tokens"].get("length", 0) == OUTPUT_TOKENS * without["ended"].get("length", 0)
    assert 0 < without["decodes_per_step"] <= 4
    assert set(without["cores"]) == {"scheduler", "executor", "clients"}
