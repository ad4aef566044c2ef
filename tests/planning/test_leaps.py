"""Leaps of the simulation: they give the same result as single steps."""

from dataclasses import asdict
from unittest.mock import patch

import pytest

from planning.arrivals import Bursts, ClosedLoop, Poisson
from planning.lengths import FixedLengths
from planning.records import Records
from planning.server import Server
from planning.simulation import Horizon
from planning.workload import Job, Tenant
from scheduler.core import SchedulerLimits, TenantTerms
from tests.support.planning.simulations import SMALL, Steady, draw, run, summary


def test_a_leap_takes_the_time_of_its_steps() -> None:
    """The decodes of one sequence are simulated in one leap; their times form an arithmetic series."""
    with patch.object(Records, "leap", autospec=True, side_effect=Records.leap) as leap:
        records = run([Job(0.0, 0, 100, 100)])
    steps_s = [5e-3 + 1e-4 + 100 * 2e-5 + 5050 * 1e-10] + [5e-3 + 1e-5 + n * 4e-8 for n in range(101, 200)]
    assert records.virtual_s == pytest.approx(sum(steps_s))
    assert records.counters.num_steps == 100
    assert records.num_leapt_steps > 80
    assert leap.call_count < 4


@pytest.mark.parametrize("num_blocks", [4000, 300, 90])
@pytest.mark.parametrize("arrivals", [Poisson(8.0), ClosedLoop(40, 0.1), Bursts(10.0, 6.0)])
@pytest.mark.parametrize("num_system_tokens", [0, 70])
def test_leaps_do_not_change_the_result(
    arrivals: Poisson | ClosedLoop | Bursts, num_blocks: int, num_system_tokens: int
) -> None:
    """Times, counters and integrals equal those of single steps, also under memory pressure and with prefixes.

    Blocks in use are right within a block, and samples are taken at the same times.
    """
    server = Server(SchedulerLimits(16, 512, 2048), num_blocks=num_blocks)
    tenant = Tenant("requests", arrivals, SMALL, num_system_tokens=num_system_tokens, system_share=0.7)
    leaping, stepping = (draw([tenant], Horizon(num_requests=80), server, leaps=leaps) for leaps in (True, False))
    check_are_alike(leaping, stepping)


def test_leaps_do_not_change_the_result_of_several_tenants() -> None:
    """While several tenants wait there is no leap, since each step can change which of them is next."""
    tenants = [
        Tenant("batch", ClosedLoop(12), FixedLengths(60, 90)),
        Tenant("chat", Poisson(3.0), SMALL, TenantTerms(weight=2.0)),
        Tenant("late", Poisson(1.0), SMALL, TenantTerms(priority=1)),
    ]
    server = Server(SchedulerLimits(8, 512, 2048), num_blocks=90, tenants=tuple(tenant.terms for tenant in tenants))
    leaping, stepping = (draw(tenants, Horizon(num_requests=150), server, leaps=leaps) for leaps in (True, False))
    assert leaping.counters.num_preemptions > 0
    check_are_alike(leaping, stepping)


def check_are_alike(leaping: Records, stepping: Records) -> None:
    """Checks that a run with leaps has the same result as one without them."""
    assert leaping.num_leapt_steps > 0
    assert stepping.num_leapt_steps == 0
    assert asdict(leaping.counters) == asdict(stepping.counters)
    for name in ("arrival_s", "planned_s", "first_token_s", "end_s"):
        assert list(getattr(leaping.requests, name)) == pytest.approx(list(getattr(stepping.requests, name)))
    for name in ("busy_s", "sequence_steps_s", "waiting_s", "virtual_s"):
        assert getattr(leaping, name) == pytest.approx(getattr(stepping, name))
    assert leaping.block_s / leaping.virtual_s == pytest.approx(stepping.block_s / stepping.virtual_s, abs=1.0)
    assert [sample.now_s for sample in leaping.samples] == pytest.approx([sample.now_s for sample in stepping.samples])
    assert [sample.usage for sample in leaping.samples] == [sample.usage for sample in stepping.samples]
    assert summary(leaping).waste_ratio == pytest.approx(summary(stepping).waste_ratio)


def test_a_long_leap_counts_the_blocks_that_were_held_in_each_of_its_steps() -> None:
    """A sequence of 16 tokens gets 1,000 more, and holds 2 to 64 blocks in the meantime."""
    records = run([Job(0.0, 0, 16, 1000)], Steady(0.01))
    held = [-(-num_tokens // 16) for num_tokens in range(17, 1017)]
    assert records.num_leapt_steps > 950
    assert records.block_s / records.virtual_s == pytest.approx(sum(held) / len(held), abs=1.0)


def test_the_blocks_of_an_ended_sequence_are_not_counted_during_the_leap_that_follows() -> None:
    """The second request holds 188 blocks for two steps; the first one then decodes alone."""
    jobs = [Job(0.0, 0, 16, 600), Job(0.5, 0, 3000, 2)]
    leaping, stepping = (run(jobs, Steady(0.01), leaps=leaps) for leaps in (True, False))
    assert leaping.num_leapt_steps > 500
    assert leaping.block_s / leaping.virtual_s == pytest.approx(stepping.block_s / stepping.virtual_s, abs=1.0)
