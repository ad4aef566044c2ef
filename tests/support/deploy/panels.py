"""The queries of the committed dashboards, and the Prometheus rules."""

import json
import re
from dataclasses import dataclass
from typing import Any

import yaml

from tests.support.e2e.process import ROOT

DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
NAME = re.compile(r"\b(?:[a-z_]+:)?quire_\w+(?::\w+)?")
"""The name of a metric or of a recorded series, which contains colons."""

# Values for the variables that Grafana replaces.
_VARIABLES = {"$__rate_interval": "10s", "$model": ".*", "$ttft": "1.0", "$itl": "0.1"}


@dataclass(frozen=True, slots=True)
class Query:
    """An expression of PromQL without variables, and the place where it is used."""

    place: str
    expression: str


def dashboards() -> dict[str, dict[str, Any]]:
    """Returns the committed dashboards by file name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.glob("*.json"))}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the panels of a dashboard, without rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def panel_queries() -> list[Query]:
    """Returns the queries of all panels."""
    return [
        Query(f"{name}: {panel['title']}, {target['refId']}", _filled(target["expr"]))
        for name, board in dashboards().items()
        for panel in panels(board)
        for target in panel["targets"]
    ]


def rules() -> list[dict[str, Any]]:
    """Returns all rules, for recording and alerting."""
    return [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def rule_queries() -> list[Query]:
    """Returns the series of recording rules, and the selectors in alerts.

    An alert itself returns no data while there is no problem.
    """
    recorded = [Query(f"rule {rule['record']}", rule["record"]) for rule in rules() if "record" in rule]
    selectors = [
        Query(f"alert {rule['alert']}: {selector}", selector)
        for rule in rules()
        if "alert" in rule
        for selector in re.findall(rf"(?:{NAME.pattern}|\bup\b)(?:\{{[^}}]*\}})?", rule["expr"])
    ]
    return recorded + selectors


def _filled(expression: str) -> str:
    for variable, value in _VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression
