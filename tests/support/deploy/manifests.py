"""Reads the manifests of deploy/kubernetes, checks them against schemas, and finds their containers."""

import shutil
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.support.deploy.custom_resources import SCHEMAS
from tests.support.paths import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
BASE = sorted(path for path in (FOLDER / "base").glob("*.yaml") if path.name != "kustomization.yaml")
LAYERS = ("base", "overlays/cpu", "overlays/two-replicas")
VERSION = "1.33"
"""Kubernetes' version whose schemas are checked. StatefulSets number their pods by a label since 1.28."""

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """The pod template of a manifest, and its only container."""

    name: str
    labels: dict[str, str]
    pod: Manifest

    @property
    def container(self) -> Manifest:
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def flags(self) -> dict[str, str]:
        """The arguments by flag."""
        pairs = (argument.partition("=") for argument in self.container["args"])
        return {flag: value for flag, _, value in pairs}


@cache
def base() -> list[Manifest]:
    """Returns the manifests of the base as they are written."""
    return [manifest for path in BASE for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


@cache
def rendered(layer: str) -> list[Manifest]:
    """Returns the manifests of a kustomization. Needs kubectl, but no cluster."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / layer)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


HAS_KUBECTL = shutil.which("kubectl") is not None


def validate(manifest: Manifest) -> None:
    """Raises an exception unless a manifest follows the schema of its kind, and that of a pod for its template."""
    custom = SCHEMAS.get(f"{manifest['apiVersion']}/{manifest['kind']}")
    if custom is None:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
        return
    jsonschema.validate(manifest, custom)
    if manifest["kind"] == "LeaderWorkerSet":
        template = deepcopy(manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"])
        kubernetes_validate.validate(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": "executor"},
                "spec": {"selector": {}, "template": template},
            },
            VERSION,
            strict=True,
        )


def workloads(manifests: list[Manifest]) -> Iterator[Workload]:
    for manifest in manifests:
        spec = manifest.get("spec", {})
        template = spec.get("template") or spec.get("leaderWorkerTemplate", {}).get("workerTemplate")
        if template is not None:
            yield Workload(manifest["metadata"]["name"], template["metadata"]["labels"], template["spec"])
