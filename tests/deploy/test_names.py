"""Every name that somebody reads exists in code, and every metric of the code is explained."""

import re

from deploy.reference import PAGE, metric_names
from tests.deploy.conftest import Observed
from tests.deploy.panels import NAME, panel_queries, rules
from tests.e2e.process import ROOT


def served_names(observed: Observed) -> set[str]:
    return set().union(*map(metric_names, observed.pages()))


def names_in(text: str) -> set[str]:
    return set(NAME.findall(text))


def test_dashboards_ask_for_what_exists(observed: Observed) -> None:
    asked = set().union(*(names_in(query.expression) for query in panel_queries()))
    assert asked - served_names(observed) == set()


def test_rules_ask_for_what_exists(observed: Observed) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = set().union(*(names_in(rule["expr"]) for rule in rules()))
    assert asked - served_names(observed) - recorded == set()
    assert len(recorded) == len([rule for rule in rules() if "record" in rule])


def test_the_documentation_names_what_exists(observed: Observed) -> None:
    served = served_names(observed)
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in served}
    for page in (*ROOT.glob("docs/*.md"), ROOT / "README.md"):
        named = set(re.findall(r"\bquire_[a-z0-9_]+\b", page.read_text(encoding="utf-8")))
        assert named - families - served == set(), page.name


def test_every_metric_is_in_the_documentation(observed: Observed) -> None:
    text = PAGE.read_text(encoding="utf-8")
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in served_names(observed)}
    assert {name for name in families if f"| `{name}` |" not in text} == set()
