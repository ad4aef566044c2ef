"""Writes the dashboards that Grafana is provisioned with. Run `make dashboards` or `python -m deploy.grafana.build`."""

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.executor import executor
from deploy.grafana.kv_cache import kv_cache
from deploy.grafana.overview import overview

DIRECTORY = Path(__file__).resolve().parent / "dashboards"
DASHBOARDS = {"overview": overview, "kv-cache": kv_cache, "executor": executor}


def rendered() -> dict[str, str]:
    """Returns the JSON of each dashboard by file name. The text depends only on the code."""
    return {f"{name}.json": _as_json(_numbered(make().build())) for name, make in DASHBOARDS.items()}


def _as_json(board: Dashboard) -> str:
    return json.dumps(board, cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _numbered(board: Dashboard) -> Dashboard:
    """Numbers the panels in their order, because ids must be unique within a dashboard."""
    for number, panel in enumerate(board.panels or (), start=1):
        panel.id_val = number
    return board


def write(directory: Path = DIRECTORY) -> None:
    """Writes all dashboards to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
