"""Prometheus accepts the configuration and the rules, and every alert has a test."""

import shutil
import subprocess

import pytest
import yaml

from tests.support.deploy.panels import RULES, rules

DIRECTORY = RULES.parent
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def test_every_alert_has_a_test() -> None:
    cases = yaml.safe_load((DIRECTORY / "rules_test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {
        case["alertname"] for each in cases for case in each.get("alert_rule_test", ()) if case["exp_alerts"] != []
    }
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}


@promtool
@pytest.mark.parametrize(
    "words",
    [("check", "config", "prometheus.yml"), ("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")],
    ids=" ".join,
)
def test_promtool_passes(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=DIRECTORY, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
