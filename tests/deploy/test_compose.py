"""The services of compose.yaml have few rights and few ports, and all settings are in one file."""

import re
from string import Template
from typing import Any

import pytest
import yaml

from gateway.config import GatewayConfig
from scheduler.config import SchedulerConfig
from tests.support.e2e.process import ROOT

TEXT = (ROOT / "compose.yaml").read_text(encoding="utf-8")
SERVICES: dict[str, Any] = yaml.safe_load(TEXT)["services"]
SETTINGS = dict(
    line.split("=", 1)
    for line in (ROOT / ".env").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)
services = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)


@services
def test_services_are_confined(service: dict[str, Any]) -> None:
    assert service["user"].split(":")[0] != "0"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["healthcheck"]["test"][0] == "CMD"


@services
def test_services_are_bounded(service: dict[str, Any]) -> None:
    """One service cannot take the machine's memory, processes, descriptors or disk (with its log)."""
    assert service["mem_limit"]
    assert service["pids_limit"] <= 1024
    assert service["ulimits"]["nofile"] <= 65536
    assert service["logging"]["driver"] == "json-file"
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}


@services
def test_mounts_from_the_host_are_read_only(service: dict[str, Any]) -> None:
    for volume in service["volumes"]:
        assert volume.startswith(tuple(yaml.safe_load(TEXT)["volumes"])) or volume.endswith(":ro")


@pytest.mark.parametrize("name", SERVICES)
def test_only_services_that_know_their_callers_are_published_on_the_bind_address(name: str) -> None:
    address = "127.0.0.1:" if name in ("prometheus", "grafana") else "${BIND}:"
    assert all(port.startswith(address) for port in SERVICES[name].get("ports", ()))


def test_executors_publish_no_port() -> None:
    published = {name for name, service in SERVICES.items() if service.get("ports")}
    assert published == {"gateway", "scheduler", "scheduler-gpu", "prometheus", "grafana"}
    assert SETTINGS["BIND"] == "127.0.0.1"


def test_scheduler_and_executor_meet_at_a_socket_file_that_only_their_user_can_open() -> None:
    for names in (("scheduler", "executor"), ("scheduler-gpu", "executor-gpu")):
        scheduler, executor = (SERVICES[name] for name in names)
        assert "--executor unix:/run/quire/executor.sock " in scheduler["command"]
        assert "--listen-address unix:/run/quire/executor.sock " in executor["command"]
        assert "unix:/run/quire/executor.sock" in executor["healthcheck"]["test"]
        assert "hop:/run/quire" in scheduler["volumes"]
        assert "hop:/run/quire" in executor["volumes"]
        assert scheduler["user"] == executor["user"]
    assert "50052" not in TEXT
    for name in ("scheduler", "executor"):
        image = (ROOT / "deploy" / f"{name}.Dockerfile").read_text(encoding="utf-8")
        assert "install -d -m 700 /run/quire && chown -R 10001:10001 /cache /run/quire" in image


def test_one_profile_computes_on_the_cpu_and_one_on_a_gpu() -> None:
    assert SETTINGS["COMPOSE_PROFILES"] == "cpu"
    by_profile = {
        profile: {name for name, service in SERVICES.items() if service.get("profiles") == [profile]}
        for profile in ("cpu", "gpu")
    }
    assert by_profile == {"cpu": {"executor", "scheduler"}, "gpu": {"executor-gpu", "scheduler-gpu"}}
    (device,) = SERVICES["executor-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    for profile in by_profile.values():
        aliases = [alias for name in profile for alias in SERVICES[name]["networks"]["default"]["aliases"]]
        assert sorted(aliases) == ["executor", "scheduler"]


def test_the_scheduler_drains_before_its_executor_ends() -> None:
    for scheduler, executor in (("scheduler", "executor"), ("scheduler-gpu", "executor-gpu")):
        assert SERVICES[scheduler]["depends_on"] == {executor: {"condition": "service_healthy"}}


def test_a_service_that_hangs_is_killed_and_restarted() -> None:
    """A scheduler is not killed because its executor is away, so its check also tests whether it is alive."""
    for name in ("executor", "executor-gpu", "scheduler", "scheduler-gpu"):
        check = SERVICES[name]["healthcheck"]["test"]
        assert (SERVICES[name]["restart"], SERVICES[name]["init"]) == ("unless-stopped", True)
        assert int(check[check.index("--kill-after") + 1]) > 1
        assert ("--alive" in check) == name.startswith("scheduler")


def config_of(config: type[Any], service: str, settings: dict[str, str]) -> Any:
    """Returns the configuration that a service gets from compose.yaml with these settings."""
    words = Template(SERVICES[service]["command"]).substitute(settings).split()
    starts = [index for index, word in enumerate(words) if word.startswith("--")]
    values: dict[str, Any] = {}
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        name = words[start].removeprefix("--").replace("-", "_")
        values[name] = " ".join(words[start + 1 : end]) or True
    return config.from_dict(values | {"drain_timeout_s": float(values["drain_timeout_s"])})


def test_what_the_page_says_lets_others_in_with_a_key_and_over_tls() -> None:
    """Section "Let others reach it" of docs/operations.md, whose settings replace those of .env."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.split("### Let others reach it\n")[1].split("\n## ")[0]
    changed = dict(re.findall(r"^    ([A-Z_]+)=(.+)$", section, re.MULTILINE))
    assert changed.keys() == {"BIND", "IDENTITY_FLAGS", "GATEWAY_FLAGS", "GATEWAY_SCHEME", "QUIRE_API_KEY"}
    assert changed.keys() <= SETTINGS.keys()
    scheduler = config_of(SchedulerConfig, "scheduler", SETTINGS | changed)
    gateway = config_of(GatewayConfig, "gateway", SETTINGS | changed)
    for config in (scheduler, gateway):
        assert config.tls_certificate is not None
        assert not config.allow_anonymous
    assert scheduler.api_keys is not None
    assert gateway.scheduler_ca is not None, "the scheduler answers over TLS only"
    assert (gateway.live_page, gateway.hosts) == ("https://HOST:8080", scheduler.allowed_hosts), (
        "its page links to both"
    )
    check = Template(str(SERVICES["gateway"]["healthcheck"]["test"])).substitute(SETTINGS | changed)
    assert "https://127.0.0.1:8000/healthz" in check
    override, scrape = map(yaml.safe_load, re.findall(r"^```yaml\n(.+?)^```", section, re.MULTILINE | re.DOTALL))
    assert override["services"].keys() == {"scheduler", "gateway", "prometheus"}
    assert {each for service in override["services"].values() for each in service["volumes"]} == {"./keys:/keys:ro"}
    assert (scrape["scheme"], set(scrape)) == ("https", {"scheme", "authorization", "tls_config"})
    named = re.findall(r"/keys/([\w.]+)", f"{changed} {scrape}")
    assert [name for name in named if f"`{name}`" not in section and f"keys/{name}\n" not in section] == []


def test_every_setting_has_a_default() -> None:
    assert set(re.findall(r"\$\{(\w+)\}", TEXT)) | {"COMPOSE_PROFILES"} == set(SETTINGS)


@pytest.mark.parametrize("path", sorted(ROOT.glob("deploy/**/*Dockerfile")), ids=lambda path: path.name)
def test_images_use_the_given_base_image_and_no_root(path: Any) -> None:
    text = path.read_text(encoding="utf-8")
    stages = re.findall(r"^FROM (\S+)(?: AS ([\w-]+))?", text, re.MULTILINE)
    names = {name for _, name in stages}
    assert text.index("ARG BASE_IMAGE=") < text.index("FROM ")
    assert {base for base, _ in stages} <= {"${BASE_IMAGE}"} | names
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1].split(":")[0] not in ("0", "root")


def test_what_the_images_copy_is_sent_to_the_engine() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for dockerfile in ROOT.glob("deploy/*.Dockerfile"):
        copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.+) \S+$", dockerfile.read_text(), re.MULTILINE)
        sources = {source for line in copied for source in line.split()}
        missing = {source for source in sources if source not in sent and source.split("/")[0] not in sent}
        assert missing == set(), dockerfile.name
