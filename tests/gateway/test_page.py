"""The page docs/openai.md names every field, metric and endpoint."""

import re

from gateway.api.chat import KNOWN as CHAT
from gateway.api.completions import KNOWN as COMPLETION
from gateway.api.sampling import IGNORED
from tests.support.deploy.panels import NAME
from tests.support.gateway.rig import Rig
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "openai.md").read_text(encoding="utf-8")


def test_every_field_is_documented() -> None:
    table = PAGE.partition("<!-- fields -->")[2].partition("<!-- end of fields -->")[0]
    rows = [line.split("|")[2:-1] for line in table.strip().splitlines()[2:]]
    both, chat, completion = ({name for row in rows for name in re.findall(r"`(\w+)`", row[i])} for i in range(3))
    assert both == (CHAT & COMPLETION | IGNORED) - {"logprobs"}
    assert chat == CHAT - both
    assert completion == COMPLETION - both
    assert set(re.findall(r"`(\w+)`", rows[-1][0])) == IGNORED


async def test_every_metric_is_documented() -> None:
    async with Rig() as rig:
        await rig.chat()
        _, page = await rig.get("/metrics")
    names = {
        match[1] for match in re.finditer(r"^# TYPE (\w+) ", page, re.MULTILINE) if not match[1].endswith("_created")
    }
    assert set(re.findall(r"^\| `(quire_\w+)`", PAGE, re.MULTILINE)) == names


async def test_every_endpoint_is_documented() -> None:
    async with Rig() as rig:
        routes = {
            f"{route.method} {route.resource.canonical}"
            for route in rig.server._runner.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
    assert set(re.findall(r"`((?:GET|POST) /[^`]*)`", PAGE.partition("## Fields")[0])) == routes


async def test_dashboards_and_rules_use_existing_names() -> None:
    async with Rig(2) as rig:
        await rig.chat()
        _, page = await rig.get("/metrics")
    served = set(re.findall(r"^(quire_gateway_\w+)[{ ]", page, re.MULTILINE))
    for path in ("deploy/grafana/dashboards/overview.json", "deploy/prometheus/rules.yml"):
        used = {name for name in NAME.findall((ROOT / path).read_text()) if name.startswith("quire_gateway_")}
        assert used
        assert used <= served, path
