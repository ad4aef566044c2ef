"""Predictions from synthetic runs whose right answer is known."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from bench.load import LoadResult, RequestRecord
from bench.serving.prediction import MeasuredRun, PredictionSettings, predict, render_table
from bench.trace import TraceRequest
from planning.arrivals import ClosedLoop
from planning.fit import FittedCost
from planning.measured_steps import MeasuredStep
from planning.server import Server
from planning.simulation import Horizon, Simulation
from planning.virtual_server import VirtualServer
from planning.workload import Job, ListedJobs
from quire.block_map import ServerInfo, ServerState
from scheduler.core import SchedulerLimits

INFO = ServerInfo("0", "made up", "float32", 512, 100, 16, 500, 64, 512, "fcfs", ServerState.SERVING)
COST = FittedCost(1e-3, 5e-5, 1e-7, 1e-4, 1e-5, 1e-9)
PAUSE_S = 2e-3
TRACE = [TraceRequest(tuple(range(10 + i % 37)), 5 + 7 * i % 60) for i in range(60)]


def ideal_run(num_clients: int) -> MeasuredRun:
    """Returns the run of a server whose steps cost exactly COST, from a simulation that records its steps."""

    class Watched(VirtualServer):
        def _send_plan(self) -> bool:
            has_sent = super()._send_plan()
            if has_sent:
                flight = self._in_flight[-1]
                steps.append(MeasuredStep(1, flight.planned_s, flight.done_s, flight.load))
            return has_sent

    steps: list[MeasuredStep] = []
    server = Server(SchedulerLimits(64, 512, 512), num_blocks=501)
    jobs = [Job(0.0, 0, len(request.prompt_token_ids), request.max_tokens) for request in TRACE]
    source = ListedJobs(jobs, ClosedLoop(num_clients, PAUSE_S))
    with patch("planning.simulation.VirtualServer", Watched):
        records = Simulation(server, [source], COST, Horizon(num_requests=len(jobs)), leaps=False).run()
    seen = tuple(
        RequestRecord(arrival_s, (first_s, end_s), num_prompt, num_output)
        for arrival_s, first_s, end_s, num_prompt, num_output in zip(
            records.requests.arrival_s,
            records.requests.first_token_s,
            records.requests.end_s,
            records.requests.num_prompt_tokens,
            records.requests.num_output_tokens,
            strict=True,
        )
    )
    return MeasuredRun(TRACE, LoadResult(num_clients, records.virtual_s, seen), steps)


def test_server_with_linear_cost_is_predicted_exactly() -> None:
    runs = {number: ideal_run(number) for number in (1, 4, 8)}
    settings = PredictionSettings(fitted=(1, 8), predicted=(4,))
    prediction = predict(INFO, runs, settings)
    assert prediction.turnaround_s == pytest.approx(PAUSE_S, rel=0.01)
    assert prediction.fit.cost.overhead_s == pytest.approx(COST.overhead_s, rel=0.02)
    assert [(row.num_clients, row.is_fitted) for row in prediction.comparisons] == [(1, True), (4, False), (8, True)]
    assert prediction.max_error_ratio < 0.01
    for row in prediction.comparisons:
        assert row.predicted_tokens_per_s == pytest.approx(row.measured_tokens_per_s, rel=0.01)
        assert row.predicted_tpot_s == pytest.approx(row.measured_tpot_s, rel=0.02)
    assert render_table(prediction).row_count == 3


def test_run_that_is_slower_than_its_steps_shows_as_an_error() -> None:
    runs = {number: ideal_run(number) for number in (1, 4, 8)}
    slow = replace(runs[4].load, wall_s=2 * runs[4].load.wall_s)
    runs[4] = MeasuredRun(TRACE, slow, runs[4].steps)
    prediction = predict(INFO, runs, PredictionSettings(fitted=(1, 8), predicted=(4,)))
    assert prediction.max_error_ratio == pytest.approx(1.0, rel=0.05)
    assert prediction.comparisons[1].own_error_ratio == pytest.approx(1.0, rel=0.05)
    assert abs(prediction.comparisons[0].own_error_ratio) < 0.01
