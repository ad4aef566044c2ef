"""The committed dashboards are those that the code makes, and Grafana can read them."""

import itertools
import re
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana import build
from deploy.grafana.overview import ITL, ITL_BOUNDS_S, TTFT, TTFT_BOUNDS_S
from scheduler.telemetry.measurements import HISTOGRAMS
from tests.support.deploy.panels import DASHBOARDS, dashboards, panels
from tests.support.e2e.process import ROOT

BOARDS = dashboards()
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"
boards = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def test_the_committed_files_are_up_to_date() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in DASHBOARDS.iterdir()}
    assert committed == build.rendered(), "run `make dashboards`"


@boards
def test_grafanas_schema_has_every_field(board: dict[str, Any]) -> None:
    """Fields that Grafana's own types do not have would be lost in the round trip."""
    assert plain(Dashboard.from_json(board)) == board


@boards
def test_panels_are_complete(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels(board):
        assert panel["title"], panel
        assert panel["description"], panel["title"]
        assert panel["type"] == "heatmap" or panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert letters, panel["title"]
        assert len(set(letters)) == len(letters), panel["title"]


@boards
def test_panels_do_not_overlap(board: dict[str, Any]) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for cell in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} overlaps {taken[cell]}"
            taken[cell] = panel["title"]


@boards
def test_variables_are_defined_and_used(board: dict[str, Any]) -> None:
    defined = {variable["name"] for variable in board["templating"]["list"]}
    text = str([board["panels"], [variable.get("datasource") for variable in board["templating"]["list"]]])
    used = {name for name in re.findall(r"\$\{?(\w+)", text) if not name.startswith("__")}
    assert used == defined


def test_titles_and_ids_are_unique() -> None:
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS) == 3
    assert len({board["title"] for board in BOARDS.values()}) == len(BOARDS)


def test_the_overview_shows_refusals_at_bounds() -> None:
    (panel,) = (panel for panel in panels(BOARDS["overview.json"]) if panel["title"] == "Refused at the edge")
    expressions = " ".join(target["expr"] for target in panel["targets"])
    for counter in ("quire_calls_refused_total", "quire_requests_rejected_total", "quire_limited_total"):
        assert counter in expressions


@pytest.mark.parametrize(("bounds", "histogram"), [(TTFT_BOUNDS_S, TTFT), (ITL_BOUNDS_S, ITL)])
def test_objectives_are_bounds_of_buckets(bounds: tuple[str, ...], histogram: str) -> None:
    assert set(bounds) <= {str(float(bound)) for bound in HISTOGRAMS[histogram][0]}


def test_the_data_source_is_the_prometheus_of_compose() -> None:
    (source,) = provisioned("datasources")["datasources"]
    assert set(source) <= {"name", "uid", "type", "access", "url", "isDefault", "editable", "jsonData"}
    assert (source["type"], source["access"]) == ("prometheus", "proxy")
    assert source["url"] == "http://prometheus:9090"


def test_the_folder_is_where_compose_puts_the_dashboards() -> None:
    (provider,) = provisioned("dashboards")["providers"]
    assert set(provider) <= {"name", "folder", "folderUid", "type", "disableDeletion", "allowUiUpdates", "options"}
    assert (provider["type"], provider["folder"]) == ("file", "Quire")
    mounts = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in mounts
    assert "./deploy/grafana/provisioning:/etc/grafana/provisioning:ro" in mounts


def provisioned(kind: str) -> dict[str, Any]:
    (path,) = (PROVISIONING / kind).iterdir()
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert content["apiVersion"] == 1
    return dict(content)


def plain(value: Any) -> Any:
    """Returns a value as plain JSON values."""
    return build.json.loads(build.json.dumps(value, cls=JSONEncoder))
