"""The tables of docs/operations.md are generated from the code, and each alert has a section."""

import re
from dataclasses import fields

from deploy.reference import PAGE, flag_tables, metric_tables, with_tables
from executor.config import ExecutorConfig
from gateway.config import GatewayConfig
from quire.cli.service_flags import SERVE_FLAGS
from scheduler.config import SchedulerConfig
from tests.support.deploy.observed import Observed
from tests.support.deploy.panels import rules

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tables_are_up_to_date(observed: Observed) -> None:
    tables = flag_tables() | metric_tables(*observed.pages())
    assert set(re.findall(r"<!-- table: ([a-z ]+) -->", TEXT)) == set(tables)
    assert with_tables(TEXT, tables) == TEXT, "run `make dashboards`"


def test_every_flag_in_the_text_exists() -> None:
    flags = {
        f"--{field.name.replace('_', '-')}"
        for config in (SchedulerConfig, ExecutorConfig, GatewayConfig)
        for field in fields(config)
    }
    of_other_commands = "--help --profile --undo --no-gateway --gateway-listen --replicas --file --role --pairs"
    assert set(re.findall(r"--[a-z][a-z-]+", TEXT)) - flags == set(of_other_commands.split())


def test_the_flags_that_quire_serve_lacks_are_named() -> None:
    names = {field.name for config in (SchedulerConfig, ExecutorConfig) for field in fields(config)}
    lacking = names - {parameter.name for parameter in SERVE_FLAGS}
    start = "\n`quire serve` takes the flags of scheduler and executor, with three exceptions:\n\n"
    exceptions = TEXT.split(start)[1].split("\n\n")[0]
    flags = set(re.findall(r"--([a-z-]+)", exceptions)) - {"executor", "tls-certificate", "tls-key", "tls-client-ca"}
    assert flags == {name.replace("_", "-") for name in lacking}


def test_every_alert_has_a_runbook() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert set(re.findall(r"^### (Quire\w+)$", TEXT, re.MULTILINE)) == alerts
    for rule in rules():
        if "alert" in rule:
            assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
