"""Writes the rules of Prometheus as a resource of its operator, which reads no files. Run `make dashboards`."""

import textwrap
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
RULES = _FOLDER / "prometheus" / "rules.yml"
RESOURCE = _FOLDER / "kubernetes" / "base" / "rules.yaml"
_HEAD = """\
# For the Prometheus Operator: deploy/prometheus/rules.yml as a resource. `make dashboards` writes it.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: quire
spec:
"""


def rendered() -> str:
    """Returns the text of the resource, which depends only on RULES."""
    return _HEAD + textwrap.indent(RULES.read_text(encoding="utf-8"), "  ")


if __name__ == "__main__":
    RESOURCE.write_text(rendered(), encoding="utf-8")
