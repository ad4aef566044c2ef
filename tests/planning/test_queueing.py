"""Long simulations, compared with queueing theory."""

import pytest

from planning.arrivals import Poisson
from planning.lengths import FixedLengths
from planning.server import Server
from planning.simulation import Horizon, Simulation
from planning.workload import Source, Tenant
from scheduler.core import SchedulerLimits
from tests.support.planning.simulations import SMALL, Steady, draw, summary


def test_littles_law_holds() -> None:
    """The mean number in the queue and in service equals the rate times the mean time there, over a long Poisson run.

    The times are those of single requests; the numbers are integrals over the clock, which are recorded separately.
    """
    server = Server(SchedulerLimits(6, 512, 2048, max_in_flight=1), num_blocks=1000)
    records = draw([Tenant("requests", Poisson(30.0), SMALL)], Horizon(num_requests=2000), server)
    result = summary(records, server)
    requests = records.requests
    queue_s = sum(p - a for p, a in zip(requests.planned_s, requests.arrival_s, strict=True)) / records.num_ended
    run_s = sum(e - p for e, p in zip(requests.end_s, requests.planned_s, strict=True)) / records.num_ended
    assert result.mean_waiting > 1
    assert result.mean_waiting == pytest.approx(result.requests_per_s * queue_s, rel=0.02)
    # with one plan at a time a planned step begins at once, and from then on a sequence is in every step
    assert result.mean_batch * result.busy_ratio == pytest.approx(result.requests_per_s * run_s, rel=0.02)


def test_a_server_with_one_slot_is_an_m_d_1_queue() -> None:
    """With one slot, one plan at a time and requests of one length, the server is an M/D/1 queue.

    For Poisson arrivals and a constant service time S, the mean wait is rho S / 2 (1 - rho) (Pollaczek and Khinchine).
    """
    server = Server(SchedulerLimits(1, 64, 64, max_in_flight=1), num_blocks=20)
    service_s, load = 10 * 0.01, 0.7
    tenant = Tenant("requests", Poisson(load / service_s), FixedLengths(5, 10))
    source = Source(0, tenant, 64, seed=2)
    records = Simulation(server, [source], Steady(0.01), Horizon(num_requests=8_000)).run()
    requests = records.requests
    wait_s = sum(p - a for p, a in zip(requests.planned_s, requests.arrival_s, strict=True)) / records.num_ended
    assert wait_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.1)
    assert summary(records, server).busy_ratio == pytest.approx(load, rel=0.03)
