"""The parts that our manifests use of three custom resources, as JSON schemas that permit nothing else.

LeaderWorkerSet  kubernetes-sigs/lws v0.9.0, config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml
PodMonitor       prometheus-operator v0.91.0, example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml
PrometheusRule   the same, monitoring.coreos.com_prometheusrules.yaml
"""

from typing import Any


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_LABELS = {"type": "object", "additionalProperties": _TEXT}
_METADATA = _object(("name",), name=_TEXT, namespace=_TEXT, labels=_LABELS)
_SECRET_KEY = _object(("key",), name=_TEXT, key=_TEXT)

SCHEMAS: dict[str, dict[str, Any]] = {
    "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet": _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion=_TEXT,
        kind=_TEXT,
        metadata=_METADATA,
        spec=_object(
            ("leaderWorkerTemplate",),
            replicas={"type": "integer", "minimum": 0},
            leaderWorkerTemplate=_object(
                ("workerTemplate",),
                size={"type": "integer", "minimum": 1},
                restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                # A PodTemplateSpec, which the test checks as the template of a Deployment.
                workerTemplate={"type": "object"},
            ),
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        ),
    ),
    "monitoring.coreos.com/v1/PodMonitor": _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion=_TEXT,
        kind=_TEXT,
        metadata=_METADATA,
        spec=_object(
            ("selector",),
            selector=_object(matchLabels=_LABELS),
            podMetricsEndpoints={
                "type": "array",
                "items": _object(
                    port=_TEXT,
                    path=_TEXT,
                    interval={"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)$"},
                    scheme={"enum": ["http", "https", "HTTP", "HTTPS"]},
                    authorization=_object(type=_TEXT, credentials=_SECRET_KEY),
                    tlsConfig=_object(serverName=_TEXT, ca=_object(secret=_SECRET_KEY)),
                ),
            },
        ),
    ),
    "monitoring.coreos.com/v1/PrometheusRule": _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion=_TEXT,
        kind=_TEXT,
        metadata=_METADATA,
        spec=_object(
            groups={
                "type": "array",
                "items": _object(
                    ("name",),
                    name=_TEXT,
                    rules={
                        "type": "array",
                        "items": _object(
                            ("expr",),
                            record=_TEXT,
                            alert=_TEXT,
                            expr=_TEXT,
                            labels=_LABELS,
                            annotations=_LABELS,
                            **{"for": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}},
                        ),
                    },
                ),
            },
        ),
    ),
}
