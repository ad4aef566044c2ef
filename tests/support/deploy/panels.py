"""What the committed dashboards ask, and the rules beside them."""

import json
import re
from dataclasses import dataclass
from typing import Any

import yaml

from tests.support.e2e.process import ROOT

DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
NAME = re.compile(r"\b(?:[a-z_]+:)?quire_\w+(?::\w+)?")
"""A metric's, or a recorded rule's, which has colons."""

# What Grafana would put in.
_VARIABLES = {"$__rate_interval": "10s", "$model": ".*", "$ttft": "1.0", "$itl": "0.1"}


@dataclass(frozen=True, slots=True)
class Query:
    """An expression of PromQL without variables, and where it stands."""

    place: str
    expression: str


def dashboards() -> dict[str, dict[str, Any]]:
    """By file name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.glob("*.json"))}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that show something: rows do not."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def panel_queries() -> list[Query]:
    return [
        Query(f"{name}: {panel['title']}, {target['refId']}", _filled(target["expr"]))
        for name, board in dashboards().items()
        for panel in panels(board)
        for target in panel["targets"]
    ]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def rule_queries() -> list[Query]:
    """Of recorded rules what they record; of an alert, which returns nothing while all is well, what it looks at."""
    recorded = [Query(f"rule {rule['record']}", rule["record"]) for rule in rules() if "record" in rule]
    looked_at = [
        Query(f"alert {rule['alert']}: {selector}", selector)
        for rule in rules()
        if "alert" in rule
        for selector in re.findall(rf"(?:{NAME.pattern}|\bup\b)(?:\{{[^}}]*\}})?", rule["expr"])
    ]
    return recorded + looked_at


def _filled(expression: str) -> str:
    for variable, value in _VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression
