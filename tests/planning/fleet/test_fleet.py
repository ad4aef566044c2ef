"""Fleets of simulated replicas, compared with single servers, and under delays, losses and deaths."""

import random
from collections import Counter
from dataclasses import astuple
from math import inf

import pytest

from gateway.routing.choice import POLICIES
from planning.arrivals import ClosedLoop
from planning.errors import PlanningError
from planning.fleet.failures import Failures, parse_failures
from planning.fleet.fleet import ORACLE, Fleet
from planning.fleet.observed_index import short_digest
from planning.fleet.records import FleetRecords
from planning.fleet.simulation import FleetSimulation
from planning.fleet.summary import summarize_fleet
from planning.records import Requests
from planning.simulation import Horizon
from planning.workload import Job, ListedJobs, Source, Tenant
from tests.support.planning.fleets import SHARING, TIGHT, run_jobs, sharing, simulation_of
from tests.support.planning.simulations import COST, SERVER, SMALL, run

POLICIES_AND_ORACLE = (*POLICIES, ORACLE)


def jobs_of(number: int, rate: float, seed: int = 5) -> list[Job]:
    rng, now_s, jobs = random.Random(seed), 0.0, []
    for _ in range(number):
        now_s += rng.expovariate(rate)
        jobs.append(Job(now_s, 0, *SMALL.draw(rng, 1024)))
    return jobs


def ends(records: FleetRecords) -> list[tuple[float, float, float, int, int]]:
    return _rows(records.requests)


def single_ends(jobs: list[Job]) -> list[tuple[float, float, float, int, int]]:
    return _rows(run(jobs).requests)


def _rows(requests: Requests) -> list[tuple[float, float, float, int, int]]:
    """Returns arrival, first token and end of each request, and its sizes. Sums of leaps differ in the last bits."""
    first_s = [round(first_s, 9) for first_s in requests.first_token_s]
    end_s = [round(end_s, 9) for end_s in requests.end_s]
    sizes = requests.num_prompt_tokens, requests.num_output_tokens
    return sorted(zip(requests.arrival_s, first_s, end_s, *sizes, strict=True))


@pytest.mark.parametrize("routing", POLICIES_AND_ORACLE)
@pytest.mark.parametrize("rate", [2.0, 200.0])
def test_a_fleet_of_one_is_the_single_server(routing: str, rate: float) -> None:
    jobs = jobs_of(60, rate)
    assert ends(run_jobs(jobs, Fleet(1, routing))) == single_ends(jobs)


@pytest.mark.parametrize("rate", [4.0, 300.0])
def test_round_robin_is_as_many_single_servers(rate: float) -> None:
    jobs = jobs_of(60, rate)
    alone = [each for first in range(3) for each in single_ends(jobs[first::3])]
    assert ends(run_jobs(jobs, Fleet(3, "round-robin"))) == sorted(alone)


@pytest.mark.parametrize("is_closed_loop", [True, False])
def test_leaps_that_stop_at_each_event_change_nothing(is_closed_loop: bool) -> None:
    jobs = jobs_of(40, 5.0)
    leaping = run_jobs(jobs, Fleet(3, "cost"))
    assert ends(run_jobs(jobs, Fleet(3, "cost"), is_closed_loop=is_closed_loop)) == ends(leaping)


def test_clients_of_a_closed_loop_have_one_open_request_each() -> None:
    tenant = Tenant("clients", ClosedLoop(6, 0.1), SMALL)
    source = Source(0, tenant, 1024, seed=1)
    records = FleetSimulation(Fleet(3, "least-loaded"), SERVER, [source], COST, Horizon(num_requests=60)).run()
    assert records.num_ended == 60
    changes = sorted([*((s, 1) for s in records.requests.arrival_s), *((s, -1) for s in records.requests.end_s)])
    num_open = most = 0
    for _, change in changes:
        num_open += change
        most = max(most, num_open)
    assert most == 6


@pytest.mark.parametrize("num_routers", [1, 3])
@pytest.mark.parametrize(("delay_s", "loss"), [(0.0, 0.0), (0.05, 0.0), (0.0, 0.3), (0.05, 0.3)])
@pytest.mark.parametrize("mean_failure_s", [inf, 2.0])
def test_every_request_is_served_in_full(num_routers: int, delay_s: float, loss: float, mean_failure_s: float) -> None:
    failures = Failures(mean_s=mean_failure_s, repair_s=0.5, rng=random.Random(2))
    simulation = sharing(Fleet(4, "cost", num_routers, delay_s, loss, failures))
    records = simulation.run()
    source = Source(0, SHARING, TIGHT.limits.max_model_len, seed=3)
    jobs = source.first()
    while len(jobs) < 150:
        jobs += source.after_arrival()
    wanted = sorted((job.arrival_s, job.num_prompt_tokens, job.num_output_tokens) for job in jobs)
    assert sorted((arrival, prompt, output) for arrival, _, _, prompt, output in ends(records)) == wanted
    assert not records.open
    assert (records.num_resumptions > 0) == (records.num_deaths > 0) == (mean_failure_s < inf)
    assert (records.num_lost > 0) == (loss > 0)
    assert records.num_gaps <= records.num_lost
    assert (records.num_gaps > 0) == (loss > 0)


def test_views_equal_the_indexes_at_the_end() -> None:
    simulation = sharing(Fleet(3, "cost", 2))
    simulation.run()
    for replica in simulation._replicas.values():
        assert replica.server is not None
        held = {short_digest(digest) for digest, _ in replica.server.scheduler.state.cache.index.items()}
        for router in simulation._routers:
            view = router.replicas[replica.name].view
            assert view._held == held
            assert not view._expected


def test_a_gap_is_filled_after_a_round_trip() -> None:
    """Reports take 50 ms. The one that shows the gap arrives at 50 ms, the snapshot 100 ms later."""
    simulation = simulation_of([Job(0.0, 0, 64, 2)], Fleet(1, "cost", 1, 0.05), has_shared_prefixes=True)
    simulation._start(replica := simulation._replicas["replica-0"])
    (router,) = simulation._routers
    replica._index.publish(1, b"lost" * 8)
    replica.report()  # goes nowhere
    replica._index.publish(2, b"late" * 8)
    simulation._report(replica)
    times_s = []
    while simulation._network.next_s < inf:
        simulation.now_s = simulation._network.next_s
        simulation._network.deliver()
        times_s.append((round(simulation.now_s, 3), len(router.replicas["replica-0"].view)))
    assert router.num_gaps == 1
    assert times_s[-1] == (0.15, 2)
    assert [size for _, size in times_s[:-1]] == [0] * (len(times_s) - 1)


def test_a_death_moves_streams_with_what_they_have_received() -> None:
    """Two replicas decode one request each; replica 0 dies. Its client has its first token, and keeps its time."""
    jobs = [Job(0.0, 0, 32, 200), Job(0.001, 0, 32, 200)]
    alone = {arrival: (first, end) for arrival, first, end, _, _ in ends(run_jobs(jobs, Fleet(2, "round-robin")))}
    failures = Failures(((0, 0.5),), repair_s=100.0)
    simulation = simulation_of(jobs, Fleet(2, "round-robin", failures=failures))
    records = simulation.run()
    assert (records.num_deaths, records.num_resumptions) == (1, 1)
    assert list(records.replica_requests) == [1, 2]
    for arrival, first, end, _, output in ends(records):
        assert output == 200
        assert first == alone[arrival][0]
        assert end > alone[arrival][1]


def test_requests_wait_while_all_replicas_are_dead() -> None:
    failures = Failures(((0, 0.1), (1, 0.1)), repair_s=2.0)
    records = run_jobs([Job(0.0, 0, 32, 100), Job(0.5, 0, 32, 4)], Fleet(2, "cost", failures=failures))
    assert [output for *_, output in ends(records)] == [100, 4]
    assert min(records.requests.end_s) > 2.1
    assert records.num_deaths == 2


def test_a_new_life_starts_with_an_empty_cache() -> None:
    job = Job(0.0, 0, 340, 2, num_shared_tokens=320)
    jobs = [Job(float(i), *astuple(job)[1:]) for i in range(4)]
    failures = Failures(((0, 1.5),), repair_s=0.1)
    records = run_jobs(jobs, Fleet(1, "cost", failures=failures), has_shared_prefixes=True)
    assert list(records.requests.num_cached_tokens) == [0, 320, 0, 320]


def test_a_request_that_can_never_fit_is_refused() -> None:
    records = run_jobs([Job(0.0, 0, 5000, 10), Job(0.0, 0, 10, 10)], Fleet(2, "cost"))
    assert (records.num_refused, records.num_ended) == (1, 1)


def test_a_seed_determines_a_run() -> None:
    def result() -> object:
        failures = Failures(mean_s=3.0, repair_s=0.5, rng=random.Random(1))
        records = sharing(Fleet(4, "cost", 2, 0.02, 0.1, failures)).run()
        return ends(records), records.num_lost, list(records.replica_requests)

    assert result() == result()


def test_prefixes_are_found_where_the_choice_knows_them() -> None:
    """The pools hold a few prompts each: round robin computes them again and again, the others seldom."""
    hits = {}
    for routing in POLICIES_AND_ORACLE:
        records = sharing(Fleet(4, routing), num_requests=300).run()
        hits[routing] = records.num_hit_tokens / records.num_queried_tokens
    assert hits["round-robin"] < 0.8 * min(hits["ring"], hits["cost"], hits[ORACLE]), hits
    assert hits["cost"] >= 0.9 * hits[ORACLE]


def test_stale_and_lost_reports_cost_hits_but_no_request() -> None:
    """Snapshots after gaps keep the views so fresh that lost reports cost little; stale ones cost more."""
    ways = (0.0, 0.0), (0.0, 0.3), (1.0, 0.0)
    now, lossy, stale = (sharing(Fleet(4, "cost", 1, *way), num_requests=300).run() for way in ways)
    assert now.num_hit_tokens > stale.num_hit_tokens
    assert lossy.num_hit_tokens > 0.9 * now.num_hit_tokens
    assert now.num_ended == lossy.num_ended == stale.num_ended == 300


def test_the_summary_adds_up() -> None:
    records = sharing(Fleet(4, "least-loaded"), num_requests=100).run()
    summary = summarize_fleet(records, ["requests"], wall_s=1.0)
    assert (summary.num_requests, summary.num_replicas) == (100, 4)
    assert summary.tenants[0].num_requests == 100
    assert summary.request_imbalance == max(records.replica_requests) / 25
    assert sum(records.replica_requests) == 100
    assert summary.output_tokens_per_s == pytest.approx(sum(records.requests.num_output_tokens) / records.virtual_s)
    assert 0 < summary.busy_ratio <= 1


def test_system_prompts_are_drawn_by_zipf() -> None:
    source = Source(0, Tenant("t", SHARING.arrivals, SMALL, 0, 64, 1.0, 3, 1.0), 1024, seed=1)
    jobs = source.first()
    while len(jobs) < 3000:
        jobs += source.after_arrival()
    counts = Counter(job.system_prompt for job in jobs)
    assert [round(counts[rank] / 3000, 1) for rank in range(3)] == [0.5, 0.3, 0.2]
    assert ListedJobs(jobs).first()[0].num_shared_tokens == 64


def test_failures_are_parsed_or_refused() -> None:
    assert parse_failures(None, 3) == ()
    assert parse_failures("0@1, 2@3.5", 3) == ((0, 1.0), (2, 3.5))
    for text in ("3@1", "1", "a@1", "1@-2", "1@1,", "1@nan", "1@1e3"):
        with pytest.raises(PlanningError, match="failures: expected"):
            parse_failures(text, 3)
