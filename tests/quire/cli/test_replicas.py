"""One command line configures all replicas and the gateway before them."""

from typing import Any

import pytest

from quire.addresses import AddressInUse, with_port
from quire.cli import replicas
from quire.cli.replicas import replicated_services
from quire.cli.services import on_free_ports
from quire.settings import ConfigError

MODEL = "models/tiny"


def services(num_replicas: int = 2, **values: Any) -> replicas.ReplicatedServices:
    ports = on_free_ports({"model": MODEL}) | {"gateway": True, "gateway_listen": "127.0.0.1:0"}
    return replicated_services(ports | values, num_replicas)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that sets what this machine seems to have."""

    def has(num_cores: int = 8, num_gpus: int = 0, free_gib: float = 64) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
        monkeypatch.setattr(replicas, "_num_gpus", lambda: num_gpus)
        monkeypatch.setattr(replicas, "_free_bytes", lambda: int(free_gib * 2**30))

    return has


def test_every_process_has_addresses_of_its_own() -> None:
    found = services(3)
    addresses = [
        address
        for pair in found.replicas
        for address in (
            pair.scheduler.listen,
            pair.scheduler.local_listen,
            pair.scheduler.http_listen,
            pair.admin_address,
            pair.executor.listen_address,
            pair.executor.metrics_address,
        )
    ]
    assert len(set(addresses)) == 18
    assert all(pair.scheduler.executor == pair.executor.listen_address for pair in found.replicas)
    assert found.gateway.schedulers == [pair.scheduler.local_listen for pair in found.replicas]
    assert all(pair.scheduler.move_streams for pair in found.replicas)


def test_the_gateway_ends_first_and_takes_the_addresses_that_clients_know() -> None:
    listen = with_port("127.0.0.1:0")
    found = services(listen=listen, routing="ring")
    names = [child.name for child in found.children()]
    assert names == ["gateway", "scheduler-0", "scheduler-1", "executor-0", "executor-1"]
    assert found.gateway.grpc_listen == listen
    assert (found.gateway.routing, found.gateway.model) == ("ring", MODEL)
    own = services(tool_format="hermes", max_wait_s=3.0).gateway
    assert (own.tool_format, own.max_wait_s) == ("hermes", 3.0)
    words = found.ready_line().split()
    assert words[:2] == ["ready", f"grpc={listen}"]
    assert words[-1] == f"openai={found.gateway.listen}"
    assert words[2].count(",") == 1


def test_pages_are_at_consecutive_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.services.with_port", lambda address: address)
    found = services(
        3, http_listen="127.0.0.1:18080", metrics_address="127.0.0.1:19102", admin_listen="unix:/tmp/a.sock"
    )
    assert [pair.scheduler.http_listen for pair in found.replicas] == [f"127.0.0.1:1808{i}" for i in range(3)]
    assert [pair.executor.metrics_address for pair in found.replicas] == [f"127.0.0.1:1910{i + 2}" for i in range(3)]
    assert [pair.scheduler.admin_listen for pair in found.replicas] == [f"unix:/tmp/a-{i}.sock" for i in range(3)]


def test_executors_need_no_metrics() -> None:
    found = services(2, metrics_address="")
    assert [pair.executor.metrics_address for pair in found.replicas] == ["", ""]
    assert "metrics=off,off" in found.ready_line()


@pytest.mark.parametrize(
    ("num_cores", "num_replicas", "each"), [(8, 2, 3), (2, 2, 1), (2, 4, 1), (16, 4, 3), (3, 1, 2)]
)
def test_cores_are_divided(num_cores: int, num_replicas: int, each: int, machine: Any) -> None:
    machine(num_cores)
    assert {pair.executor.num_threads for pair in services(num_replicas).replicas} == {each}
    assert {pair.executor.num_threads for pair in services(num_replicas, num_threads=5).replicas} == {5}


def test_memory_is_divided_where_it_is_short(machine: Any) -> None:
    machine(free_gib=64)
    assert services(4).replicas[0].executor.memory_fraction is None  # 2 GiB for each
    machine(free_gib=8)
    assert services(4).replicas[0].executor.memory_fraction == pytest.approx(0.1)
    assert services(4, num_blocks=64).replicas[0].executor.memory_fraction is None


def test_each_replica_has_a_gpu_of_its_own(machine: Any) -> None:
    machine(num_gpus=4)
    assert [pair.executor.device for pair in services(4).replicas] == [f"cuda:{i}" for i in range(4)]
    assert {pair.executor.num_threads for pair in services(4).replicas} == {None}
    assert {pair.executor.device for pair in services(2, device="cpu").replicas} == {"cpu"}
    with pytest.raises(ConfigError, match="4 are here, for 5 replicas"):
        services(5)
    with pytest.raises(ConfigError, match="give --device cuda"):
        services(2, device="cuda:1")


def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, number in (("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-1", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert replicas._num_gpus() == number


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gateway": False}, "replicas need the gateway"),
        ({"http_listen": "nowhere"}, "http_listen"),
        ({"http_listen": "127.0.0.1:19080", "gateway_listen": "127.0.0.1:19081"}, "two services cannot listen on"),
        ({"listen": "nowhere"}, "listen"),
        ({"metrics_address": "127.0.0.1:99999"}, "metrics_address"),
        ({"routing": "lottery"}, "routing must be one of"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_its_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        services(2, **values)


def test_ports_that_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.services.with_port", lambda address: address)
    with pytest.raises(ConfigError, match=r"would share 127\.0\.0\.1:18081"):
        services(2, http_listen="127.0.0.1:18080", metrics_address="127.0.0.1:18081")
    with pytest.raises(ConfigError, match="at most 64"):
        services(65)


def test_a_taken_address_is_named() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(AddressInUse, match="http_listen"):
            services(2, http_listen=f"127.0.0.1:{taken.getsockname()[1]}")
