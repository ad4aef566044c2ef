"""Predictions from synthetic runs whose right answer is known."""

from dataclasses import fields, replace
from unittest.mock import patch

import pytest

from bench.command_line import BenchError
from bench.load import LoadResult, RequestRecord
from bench.serving import prediction
from bench.serving.prediction import NOT_SIMULATED, MeasuredRun, PredictionSettings, main, predict, render_table
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
from scheduler.engine.options import TARGET_ON_GPU_MS, EngineOptions

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
    found = predict(INFO, runs, settings)
    assert found.turnaround_s == pytest.approx(PAUSE_S, rel=0.01)
    assert found.fit.cost.overhead_s == pytest.approx(COST.overhead_s, rel=0.02)
    assert [(row.num_clients, row.is_fitted) for row in found.comparisons] == [(1, True), (4, False), (8, True)]
    assert found.max_error_ratio < 0.01
    for row in found.comparisons:
        assert row.predicted_tokens_per_s == pytest.approx(row.measured_tokens_per_s, rel=0.01)
        assert row.predicted_tpot_s == pytest.approx(row.measured_tpot_s, rel=0.02)
    assert render_table(found).row_count == 3


def test_run_that_is_slower_than_its_steps_shows_as_an_error() -> None:
    runs = {number: ideal_run(number) for number in (1, 4, 8)}
    slow = replace(runs[4].load, wall_s=2 * runs[4].load.wall_s)
    runs[4] = MeasuredRun(TRACE, slow, runs[4].steps)
    found = predict(INFO, runs, PredictionSettings(fitted=(1, 8), predicted=(4,)))
    assert found.max_error_ratio == pytest.approx(1.0, rel=0.05)
    assert found.comparisons[1].own_error_ratio == pytest.approx(1.0, rel=0.05)
    assert abs(found.comparisons[0].own_error_ratio) < 0.01


def test_without_a_run_that_is_a_test_there_is_no_error() -> None:
    runs = {number: ideal_run(number) for number in (1, 4)}
    assert predict(INFO, runs, PredictionSettings(fitted=(1, 4), predicted=(4,))).max_error_ratio is None


@pytest.mark.parametrize(
    "flags",
    [
        ["--target-inter-token-latency-ms", "10"],
        ["--max-in-flight=1"],
        ["--no-enable-prefix-caching"],
        ["--num-blocks", "500", "--memory", "contiguous"],
        ["--replicas", "2"],
    ],
)
def test_flags_that_are_not_simulated_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert "not simulated: --" in capsys.readouterr().err


def test_other_flags_of_the_services_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the server reports, and those that only the times of steps depend on, can be given."""
    flags = ["--num-blocks", "500", "--max-num-seqs", "8", "--dtype", "float32"]
    passed: list[object] = []

    async def run(settings: PredictionSettings, address: str | None, flags: list[str], console: object) -> None:
        passed.extend((settings.target_s, flags))
        raise BenchError

    monkeypatch.setattr(prediction, "run", run)
    with pytest.raises(BenchError):
        main(["--device", "cuda", *flags])
    assert passed == [TARGET_ON_GPU_MS / 1e3, ["--device", "cuda", *flags]]


def test_each_option_of_the_engine_is_simulated_or_refused() -> None:
    """If this fails, an option is new: the simulation has to get it, or `quire bench prediction` to refuse it."""
    options = {field.name for field in fields(EngineOptions)}
    reported = {"max_num_seqs", "max_num_batched_tokens", "policy"}
    without_effect = {"step_timeout_s", "terms_of", "describe_timeout_s", "max_backoff_s"}
    assert options - reported - without_effect == set(NOT_SIMULATED) - {"tenants", "replicas"}
