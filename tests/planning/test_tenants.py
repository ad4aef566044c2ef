"""Tenants of a simulation: they are those of the core, with its fair queue."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import quire.cli.main
from planning.arrivals import ClosedLoop, Poisson
from planning.lengths import FixedLengths
from planning.request_factory import MAX_SYSTEM_PROMPTS, MAX_TENANTS, RequestFactory
from planning.server import Server
from planning.simulation import Horizon
from planning.summary import TenantSummary
from planning.workload import Job, Tenant
from scheduler.core import SchedulerLimits, TenantTerms
from tests.support.planning.simulations import draw, summary

SERVER = Server(SchedulerLimits(8, 512, 1024), num_blocks=500)


def run(*tenants: Tenant, are_known: bool = True) -> list[TenantSummary]:
    """Returns the summaries of tenants that send requests for a minute, and of all of them before these."""
    server = replace(SERVER, tenants=tuple(tenant.terms for tenant in tenants) if are_known else ())
    records = draw(tenants, Horizon(duration_s=60.0), server)
    return list(summary(records, server, [tenant.name for tenant in tenants]).tenants)


def mean_queue_s(tenant: TenantSummary) -> float:
    assert tenant.queue_s is not None
    return tenant.queue_s.mean


def test_tenants_have_their_own_summaries() -> None:
    whole, batch, chat = run(
        Tenant("batch", ClosedLoop(30), FixedLengths(100, 100)), Tenant("chat", Poisson(2.0), FixedLengths(20, 20))
    )
    assert (whole.name, batch.name, chat.name) == ("all", "batch", "chat")
    assert whole.num_requests == batch.num_requests + chat.num_requests


def test_a_tenant_does_not_wait_for_the_queue_of_another() -> None:
    batch = Tenant("batch", ClosedLoop(60), FixedLengths(100, 100))
    chat = Tenant("chat", Poisson(2.0), FixedLengths(20, 20))
    waits = [mean_queue_s(run(batch, chat, are_known=are_known)[2]) for are_known in (True, False)]
    assert waits[0] < waits[1] / 10


def test_tenants_get_service_by_their_weights() -> None:
    """Both always have requests in the queue."""
    heavy = Tenant("heavy", ClosedLoop(30), FixedLengths(50, 50), TenantTerms(weight=3.0))
    light = replace(heavy, name="light", terms=TenantTerms())
    _, three, one = run(heavy, light)
    assert three.num_output_tokens == pytest.approx(3 * one.num_output_tokens, rel=0.05)


def test_a_tenant_with_a_lower_priority_number_is_first() -> None:
    """The other one is served only while no urgent request waits, which is at the end."""
    urgent = Tenant("urgent", ClosedLoop(30), FixedLengths(50, 50))
    _, first, second = run(urgent, replace(urgent, name="other", terms=TenantTerms(priority=1)))
    assert second.num_requests == 30
    assert first.num_requests > 1000


def simulated(path: Path, *words: str) -> dict[str, Any]:
    """Returns the summaries by tenant of `quire simulate` with a file of tenants."""
    words = ("simulate", "qwen3-0.6b", "--num-requests", "300", "--max-num-seqs", "8", *words, "--json")
    result = CliRunner().invoke(quire.cli.main.app, [*words, "--tenants", str(path)])
    assert result.exit_code == 0, result.output
    return {tenant["name"]: tenant for tenant in json.loads(result.stdout)["summary"]["tenants"]}


@pytest.mark.parametrize("words", [(), ("--replicas", "2")])
def test_tenants_of_a_file_are_tenants_of_the_core(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The chat waits for no request of the batch, although the queue is long."""
    path = tmp_path / "tenants.json"
    batch = {"name": "batch", "clients": 100, "lengths": "sharegpt"}
    path.write_text(json.dumps([batch, {"name": "chat", "rate": 2, "lengths": "alpaca"}]))
    tenants = simulated(path, *words)
    assert tenants["chat"]["queue_s"]["p50"] < tenants["batch"]["queue_s"]["p50"] / 20


def test_the_last_of_the_most_tenants_has_token_ids_for_its_system_prompts() -> None:
    """More tenants ended the simulation with an OverflowError when the first of them sent a request."""
    server = replace(SERVER, tenants=(TenantTerms(),) * MAX_TENANTS)
    job = Job(0.0, MAX_TENANTS - 1, 40, 2, num_shared_tokens=20, system_prompt=MAX_SYSTEM_PROMPTS - 1)
    core = server.scheduler(has_shared_prefixes=True)
    core.add(RequestFactory(server).make(1, job))
    plan = core.schedule()
    assert plan is not None
    assert plan.num_tokens == 40


def test_more_tenants_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps([{"rate": 0.01}] * (MAX_TENANTS + 1)))
    result = CliRunner().invoke(quire.cli.main.app, ["simulate", "qwen3-0.6b", "--tenants", str(path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "at most 2,048 tenants" in result.stderr


def test_weight_and_priority_of_a_file_are_terms_of_the_core(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    same = {"clients": 20, "lengths": "fixed", "prompt_tokens": 50, "output_tokens": 50}
    path.write_text(json.dumps([{"name": "a", "weight": 3, **same}, {"name": "b", **same}]))
    tenants = simulated(path)
    assert tenants["a"]["num_output_tokens"] > 2 * tenants["b"]["num_output_tokens"]
    path.write_text(json.dumps([{"name": "a", "priority": 1, **same}, {"name": "b", **same}]))
    tenants = simulated(path)
    assert tenants["a"]["ttft_s"]["p50"] > 2 * tenants["b"]["ttft_s"]["p50"]
