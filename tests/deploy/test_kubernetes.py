"""The manifests of deploy/kubernetes follow their schemas, and fit the services and compose.yaml.

No cluster is needed: this checks what can be checked without one.
"""

import re
import shutil
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy import operator_rules
from executor.config import ExecutorConfig
from gateway.config import GatewayConfig
from gateway.schedulers.schedulers_file import read_addresses
from scheduler.config import SchedulerConfig
from scheduler.identity.permissions import OPEN, ROUTES
from tests.deploy.test_compose import SERVICES, SETTINGS
from tests.support.deploy.manifests import (
    FOLDER,
    HAS_KUBECTL,
    LAYERS,
    Manifest,
    Workload,
    base,
    rendered,
    validate,
    workloads,
)
from tests.support.deploy.panels import rules
from tests.support.paths import ROOT

CONFIGS: dict[str, type[Any]] = {"executor": ExecutorConfig, "scheduler": SchedulerConfig, "gateway": GatewayConfig}
WORKLOADS = {workload.name: workload for workload in workloads(base())}
MEMORY = {"executor": "EXECUTOR_MEMORY", "scheduler": "SCHEDULER_MEMORY", "gateway": "GATEWAY_MEMORY"}

each_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
each_manifest = pytest.mark.parametrize(
    "manifest", base(), ids=[f"{each['kind']} {each['metadata']['name']}" for each in base()]
)


@each_manifest
def test_manifests_follow_their_schemas(manifest: Manifest) -> None:
    validate(manifest)


@pytest.mark.skipif(not HAS_KUBECTL, reason="kubectl is not installed")
@pytest.mark.parametrize("layer", LAYERS)
def test_every_kustomization_can_be_built(layer: str) -> None:
    manifests = rendered(layer)
    for manifest in manifests:
        validate(manifest)
    found = {workload.name: workload for workload in workloads(manifests)}
    assert found.keys() == WORKLOADS.keys()
    for workload in found.values():
        _check_flags(workload)
        assert workload.container["image"] in SETTINGS.values()
    counts = {
        each["metadata"]["name"]: each["spec"]["replicas"]
        for each in manifests
        if each["kind"] in ("LeaderWorkerSet", "StatefulSet")
    }
    (file,) = (each["data"]["schedulers"] for each in manifests if each["metadata"]["name"] == "quire-schedulers")
    assert file.splitlines() == [f"scheduler-{index}.scheduler.quire.svc:50051" for index in range(counts["scheduler"])]
    assert counts["executor"] == counts["scheduler"], "every scheduler has an executor"


@each_workload
def test_flags_exist(workload: Workload) -> None:
    _check_flags(workload)


def _check_flags(workload: Workload) -> None:
    known = {f"--{each.name.replace('_', '-')}" for each in fields(CONFIGS[workload.name])}
    assert workload.flags.keys() <= known, workload.flags.keys() - known


@each_workload
def test_the_configuration_of_each_service_accepts_its_flags(workload: Workload) -> None:
    """The services refuse to listen for other machines without an identity."""
    types = {each.name: each.type for each in fields(CONFIGS[workload.name])}
    values: dict[str, Any] = {}
    for flag, value in workload.flags.items():
        name = flag.removeprefix("--").replace("-", "_")
        values[name] = float(value) if types[name] is float else value
    config = CONFIGS[workload.name].from_dict(values)
    assert not getattr(config, "allow_anonymous", False)


@each_workload
def test_ports_are_those_of_the_flags(workload: Workload) -> None:
    listens = {
        int(value.rpartition(":")[2])
        for flag, value in workload.flags.items()
        if flag in ("--listen", "--http-listen", "--listen-address", "--metrics-address")
    }
    assert listens == set(workload.ports.values())
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if probe in workload.container:
            assert workload.container[probe]["httpGet"]["port"] in workload.ports


def test_probes_ask_for_pages_that_need_no_identity() -> None:
    scheduler = WORKLOADS["scheduler"].container
    for probe, path in (("livenessProbe", "/healthz"), ("startupProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert scheduler[probe]["httpGet"]["path"] == path
        assert ROUTES["GET", path] is OPEN
    assert scheduler["readinessProbe"]["httpGet"]["scheme"] == "HTTPS", "only /healthz is answered in clear text"
    gateway = WORKLOADS["gateway"].container
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/health"


@each_workload
def test_images_and_memory_are_those_of_compose(workload: Workload) -> None:
    assert workload.container["image"] in SETTINGS.values()
    assert all("${" + name in str(SERVICES) for name in ("SCHEDULER_IMAGE", "EXECUTOR_GPU_IMAGE"))
    memory = SETTINGS[MEMORY[workload.name]].replace("g", "Gi")
    assert workload.container["resources"]["limits"]["memory"] == memory


@each_workload
def test_pods_have_few_rights(workload: Workload) -> None:
    pod, container = workload.pod, workload.container
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (service,) = {each["user"] for name, each in SERVICES.items() if name in ("executor", "scheduler", "gateway")}
    assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == service
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    assert not any("hostPath" in volume for volume in pod["volumes"])
    assert container["resources"].keys() == {"requests", "limits"}


@each_workload
def test_files_of_flags_are_mounted(workload: Workload) -> None:
    mounts = {each["mountPath"]: each["name"] for each in workload.container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in workload.pod["volumes"]}
    for flag, value in workload.flags.items():
        if value.startswith("/"):
            assert value.rpartition("/")[0] in mounts, flag
    assert not any("subPath" in each for each in workload.container["volumeMounts"]), "such a file never changes"


@each_workload
def test_a_pod_has_time_to_drain(workload: Workload) -> None:
    drain_s = float(workload.flags.get("--drain-timeout-s", 0))
    assert drain_s < workload.pod["terminationGracePeriodSeconds"]


def test_secrets_are_named_and_not_contained() -> None:
    assert not [each for each in base() if each["kind"] == "Secret"]
    text = yaml.safe_dump([each for each in base() if each["kind"] != "PrometheusRule"])
    names = set(re.findall(r"(?:secretName|name): (quire-[a-z-]+)", text)) - {"quire-model", "quire-schedulers"}
    page = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
    assert names == {name for name in names if f"`{name}`" in page}, "the page says how to make them"


def test_selectors_find_pods() -> None:
    for manifest in base():
        spec = manifest["spec"]
        selector = spec.get("podSelector") or spec.get("selector") or {}
        wanted = selector.get("matchLabels", selector if manifest["kind"] == "Service" else {})
        if manifest["kind"] in ("NetworkPolicy", "Service", "PodDisruptionBudget", "StatefulSet", "Deployment"):
            assert any(wanted.items() <= workload.labels.items() for workload in WORKLOADS.values()), manifest[
                "metadata"
            ]


def test_network_policies_and_services_name_ports_of_their_pods() -> None:
    by_label = {workload.labels["app.kubernetes.io/name"]: workload for workload in WORKLOADS.values()}
    covered = set()
    for manifest in base():
        spec = manifest["spec"]
        if manifest["kind"] == "NetworkPolicy":
            workload = by_label[spec["podSelector"]["matchLabels"]["app.kubernetes.io/name"]]
            ports = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
            assert ports == workload.ports.keys()
            covered.add(workload.name)
        if manifest["kind"] == "Service":
            workload = by_label[spec["selector"]["app.kubernetes.io/name"]]
            assert all(port["targetPort"] in workload.ports for port in spec["ports"])
    assert covered == WORKLOADS.keys()


def test_prometheus_scrapes_every_workload() -> None:
    (monitor,) = (each for each in base() if each["kind"] == "PodMonitor")
    ports = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert all(ports & workload.ports.keys() for workload in WORKLOADS.values())
    (silent,) = (rule for rule in rules() if rule.get("alert") == "QuireExecutorSilent")
    (longest_s,) = re.findall(r"silence_seconds:min > (\d+)", silent["expr"])
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        assert int(endpoint["interval"].removesuffix("s")) * 2 <= int(longest_s), "the silence between scrapes counts"
    assert monitor["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/part-of": "quire"}
    kustomization = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text(encoding="utf-8"))
    assert kustomization["labels"] == [{"pairs": {"app.kubernetes.io/part-of": "quire"}, "includeTemplates": True}]


@pytest.mark.skipif(not HAS_KUBECTL, reason="kubectl is not installed")
def test_clusters_have_the_rules_of_prometheus() -> None:
    """Without them, a cluster would have metrics and no alert."""
    assert operator_rules.RESOURCE.read_text(encoding="utf-8") == operator_rules.rendered(), "run `make dashboards`"
    (resource,) = (each for each in rendered("base") if each["kind"] == "PrometheusRule")
    found = [rule for group in resource["spec"]["groups"] for rule in group["rules"]]
    # kustomize adds empty lines to folded text, which PromQL does not mind.
    assert [each | {"expr": each["expr"].split()} for each in found] == [
        each | {"expr": each["expr"].split()} for each in rules()
    ]


@pytest.mark.skipif(not HAS_KUBECTL, reason="kubectl is not installed")
def test_prometheus_finds_the_pods_of_every_workload() -> None:
    """The label that kustomize sets is not set in the template of a LeaderWorkerSet, which it does not know."""
    manifests = rendered("base")
    (monitor,) = (each for each in manifests if each["kind"] == "PodMonitor")
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    for workload in workloads(manifests):
        assert selector <= workload.labels.items(), workload.name


def test_a_gateway_serves_until_no_node_routes_to_it_and_then_has_time_to_drain() -> None:
    gateway = WORKLOADS["gateway"]
    wait_s = gateway.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert wait_s + int(gateway.flags["--drain-timeout-s"]) <= gateway.pod["terminationGracePeriodSeconds"]


@each_workload
def test_draining_nodes_takes_one_pod_of_a_kind_at_a_time(workload: Workload) -> None:
    budgets = [each["spec"] for each in base() if each["kind"] == "PodDisruptionBudget"]
    (own,) = (each for each in budgets if each["selector"]["matchLabels"].items() <= workload.labels.items())
    assert (own["maxUnavailable"], own["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_gateways_stay_in_their_service_while_executors_are_replaced() -> None:
    """`/health` fails as soon as no executor serves, and requests that come meanwhile wait and succeed."""
    probe = WORKLOADS["gateway"].container["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 600, "two minutes for a hang, and then a model to load"


def test_each_hop_agrees_on_names_and_addresses() -> None:
    executor, scheduler, gateway = (WORKLOADS[name].flags for name in ("executor", "scheduler", "gateway"))
    assert scheduler["--executor"] == f"executor-$(INDEX).executor:{WORKLOADS['executor'].ports['executor']}"
    assert (scheduler["--executor-name"], executor["--scheduler-name"]) == ("executor.quire", "scheduler.quire")
    assert gateway["--schedulers-file"] == "/etc/quire/schedulers"
    for path in FOLDER.glob("**/schedulers"):
        addresses = read_addresses(str(path))
        assert addresses == tuple(f"scheduler-{index}.scheduler.quire.svc:50051" for index in range(len(addresses)))


def test_the_model_is_where_the_executor_looks_for_it() -> None:
    text = (FOLDER / "base" / "kustomization.yaml").read_text(encoding="utf-8")
    mounts = [each["mountPath"] for each in WORKLOADS["executor"].container["volumeMounts"]]
    assert all(path in mounts for path in re.findall(r"(?<=\s)/[a-z/]+", text))


def test_gateways_have_the_tokenizer_by_which_prompts_find_their_cached_prefixes() -> None:
    """Without it, `--routing cost` knows no tokens, and sends every prompt by its first bytes."""
    gateway = WORKLOADS["gateway"]
    assert gateway.flags["--model"] == WORKLOADS["scheduler"].flags["--model"] == "$(MODEL)"
    assert {"configMapRef": {"name": "quire-model"}} in gateway.container["envFrom"]
    assert {"name": "hub", "mountPath": "/cache/hub"} in gateway.container["volumeMounts"]


def test_an_executor_that_crashes_keeps_what_it_has_downloaded() -> None:
    """The cache of the hub is a volume of the pod, so the group, which has no other pod, must not be recreated."""
    (group,) = (each["spec"]["leaderWorkerTemplate"] for each in base() if each["kind"] == "LeaderWorkerSet")
    assert (group["size"], group["restartPolicy"]) == (1, "None")
    probe = WORKLOADS["executor"].container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 7200, "as docs/scale-out.md says"


@pytest.mark.skipif(not HAS_KUBECTL, reason="kubectl is not installed")
def test_the_volume_of_the_page_replaces_the_cache_of_the_hub(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
    (patch,) = re.findall(r"^```yaml\n(patches:.+?)^```", page, re.MULTILINE | re.DOTALL)
    shutil.copytree(FOLDER / "base", tmp_path / "base")
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay" / "kustomization.yaml").write_text(f"resources: [../base]\n{patch}")
    manifests = rendered(str(tmp_path / "overlay"))
    for manifest in manifests:
        validate(manifest)
    (executor,) = (each for each in workloads(manifests) if each.name == "executor")
    volumes = {each["name"]: each for each in executor.pod["volumes"]}
    assert volumes["hub"] == {"name": "hub", "persistentVolumeClaim": {"claimName": "your-claim"}}
    assert volumes.keys() == {each["name"] for each in WORKLOADS["executor"].pod["volumes"]}


def _planted(kind: str) -> Manifest:
    return deepcopy(next(each for each in base() if each["kind"] == kind))


def test_mistakes_are_found() -> None:
    """The schemas permit no unknown field, at the top and in the pods of a custom resource."""
    wrong = _planted("Deployment")
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(wrong)
    wrong = _planted("LeaderWorkerSet")
    wrong["spec"]["size"] = 1
    with pytest.raises(jsonschema.ValidationError):
        validate(wrong)
    wrong = _planted("LeaderWorkerSet")
    wrong["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["ports"] = 7
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(wrong)
    wrong = _planted("PodMonitor")
    wrong["spec"]["podMetricsEndpoints"][0]["portName"] = "metrics"
    with pytest.raises(jsonschema.ValidationError):
        validate(wrong)
    workload = deepcopy(WORKLOADS["gateway"])
    workload.pod["containers"][0]["args"].append("--no-such-flag=1")
    with pytest.raises(AssertionError, match="no-such-flag"):
        _check_flags(workload)
