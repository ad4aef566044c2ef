"""Panels show the right values for given series, by Prometheus' own evaluation of the committed queries."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deploy.manifests import base
from tests.support.deploy.panels import dashboards, panel_queries, panels

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")

# Two replicas: the pool of one is nearly idle, with one sequence that has just begun its block.
_POOLS = {
    'quire_kv_blocks{model_name="tiny", instance="busy:8080", state="active"}': 90,
    'quire_kv_blocks{model_name="tiny", instance="busy:8080", state="free"}': 10,
    'quire_kv_blocks{model_name="tiny", instance="idle:8080", state="active"}': 1,
    'quire_kv_blocks{model_name="tiny", instance="idle:8080", state="free"}': 99,
    'quire_kv_occupancy_ratio{model_name="tiny", instance="busy:8080"}': 0.9,
    'quire_kv_occupancy_ratio{model_name="tiny", instance="idle:8080"}': 0.01,
    'quire_kv_slots{model_name="tiny", instance="busy:8080", state="used"}': 1425,
    'quire_kv_slots{model_name="tiny", instance="busy:8080", state="wasted"}': 15,
    'quire_kv_slots{model_name="tiny", instance="idle:8080", state="used"}': 1,
    'quire_kv_slots{model_name="tiny", instance="idle:8080", state="wasted"}': 15,
    'quire_kv_waste_ratio{model_name="tiny", instance="busy:8080"}': 15 / 1440,
    'quire_kv_waste_ratio{model_name="tiny", instance="idle:8080"}': 15 / 16,
}
_EMPTY_POOL = {f'quire_kv_slots{{model_name="tiny", state="{state}"}}': 0 for state in ("used", "wasted")}
_READY = {
    'quire_ready{instance="a:8080"}': 1,
    'up{job="quire-scheduler", instance="a:8080"}': 1,
    'up{job="quire-gateway", instance="gateway:8000"}': 1,
    'up{job="quire-executor", instance="executor:9102"}': 0,
}
_POD = 'job="llm/quire", endpoint='
_READY_PODS = {
    'quire_ready{instance="10.0.0.1:8080"}': 1,
    f'up{{{_POD}"status", instance="10.0.0.1:8080"}}': 1,
    f'up{{{_POD}"openai", instance="10.0.0.2:8000"}}': 1,
    f'up{{{_POD}"metrics", instance="10.0.0.3:9102"}}': 1,
}


@promtool
@pytest.mark.parametrize(
    ("place", "series", "expected"),
    [
        ("kv-cache.json: Waste, A", _POOLS, 30 / 1456),
        ("kv-cache.json: Waste, A", _EMPTY_POOL, 0),
        ("kv-cache.json: Occupancy, A", _POOLS, 91 / 200),
        ("kv-cache.json: Occupancy, B", _POOLS, 0.9),
        ("overview.json: Ready, A", _READY, 1),
        ("overview.json: Ready, A", _READY | {'up{job="quire-scheduler", instance="b:8080"}': 0}, 0),
        ("overview.json: Ready, A", _READY | {'quire_ready{instance="b:8080"}': 0}, 0),
        ("overview.json: Ready, A", _READY_PODS, 1),
        ("overview.json: Ready, A", _READY_PODS | {f'up{{{_POD}"status", instance="10.0.0.4:8080"}}': 0}, 0),
    ],
)
def test_panels_show(place: str, series: dict[str, float], expected: float, tmp_path: Path) -> None:
    found = [query.expression for query in panel_queries() if query.place == place]
    assert found, place
    for expression in found:  # a tile and a panel of the same title show the same
        case = {
            "interval": "15s",
            "input_series": [{"series": name, "values": f"{value}x4"} for name, value in series.items()],
            "promql_expr_test": [
                {
                    # The sum over all labels, which rounds to what the panel shows.
                    "expr": f"round(sum({expression}), 0.0001)",
                    "eval_time": "1m",
                    "exp_samples": [{"labels": "{}", "value": round(expected, 4)}],
                }
            ],
        }
        file = tmp_path / "panel_test.yml"
        file.write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}), encoding="utf-8")
        done = subprocess.run(["promtool", "test", "rules", file], text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{expression}\n{done.stdout}{done.stderr}"


def test_numbers_of_the_present_are_asked_for_the_present() -> None:
    """A range ends with the last number of a service that is gone, however old it is."""
    of_the_present: list[dict[str, Any]] = [
        panel for board in dashboards().values() for panel in panels(board) if panel["type"] in ("stat", "bargauge")
    ]
    assert of_the_present
    for panel in of_the_present:
        for target in panel["targets"]:
            assert target.get("instant"), panel["title"]
            assert not target.get("range"), panel["title"]


def test_schedulers_are_known_by_the_port_that_the_pod_monitor_scrapes() -> None:
    (monitor,) = (each for each in base() if each["kind"] == "PodMonitor")
    assert "status" in [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
    with_status = {
        each["metadata"]["name"]
        for each in base()
        if each["kind"] in ("Deployment", "StatefulSet") and "'status'" in str(each["spec"]["template"])
    }
    assert with_status == {"scheduler"}
