"""Runs of the scheduler core alone, and the figures that claims keep of a run on services."""

from bench.claims import routing
from bench.claims.core_runs import CoreSetting, run_core
from bench.claims.served import Served, device_of, num_equal
from quire.block_map import StepTrace
from scheduler.core import Scheduler


def test_core_run_equals_the_steps_by_hand() -> None:
    """One slot and requests of 2 and 3 output tokens take five steps, more if the second one arrives late."""
    seen: list[tuple[int, list[int]]] = []

    def observe(step: int, core: Scheduler) -> None:
        seen.append((step, [sequence.request.request_id for sequence in core.state.batch.running]))

    lengths = [(4, 2), (4, 3)]
    assert run_core(CoreSetting(8, 1, 64), lengths, observe) == 5
    assert seen == [(0, [0]), (1, [0]), (2, [1]), (3, [1]), (4, [1])]
    seen.clear()
    assert run_core(CoreSetting(8, 1, 64), lengths, observe, arrival_steps=[0, 4]) == 7
    assert [step for step, _ in seen] == [0, 1, 4, 5, 6]


def test_core_run_has_at_most_num_clients_requests() -> None:
    most = 0

    def observe(step: int, core: Scheduler) -> None:
        nonlocal most
        most = max(most, core.num_unfinished_requests)

    run_core(CoreSetting(64, 8, 64), [(4, 3)] * 9, observe, num_clients=3)
    assert most == 3


def test_served_run_is_summarised() -> None:
    steps = tuple(
        StepTrace(
            epoch=1,
            step_id=i,
            num_sequences=n,
            num_tokens=n,
            planned_ns=0,
            sent_ns=0,
            received_ns=0,
            committed_ns=0,
            queue_ns=0,
            prepare_ns=0,
            forward_ns=2_000_000,
            sample_ns=0,
            idle_ns=0,
        )
        for i, n in enumerate((2, 4))
    )
    summary = {
        **dict.fromkeys(("concurrency", "num_requests", "wall_s", "requests_per_s", "output_tokens_per_s"), 1),
        "ttft_ms": {"p50": 3.0},
        "latency_ms": None,
        "pool": {"mean_waste_ratio": 0.1, "num_preemptions": 2},
    }
    assert Served(summary, steps, {}).curve() == {"seconds": [0.0, 0.0], "num_sequences": [2, 4]}
    assert len(Served(summary, steps * 1000, {}).curve()["seconds"]) == 667
    row = Served(summary, steps, {}).row()
    assert (row["mean_batch"], row["max_batch"], row["mean_step_ms"]) == (3.0, 4, 2.0)
    assert (row["ttft_p50_ms"], row["latency_p50_ms"], row["num_preemptions"]) == (3.0, None, 2)
    assert num_equal({(1,): "a", (2,): "b"}, {(1,): "a", (2,): "c"}) == 1
    assert str(device_of({"device": "cpu"})) == "cpu"


def test_a_fleet_is_simulated_and_judged() -> None:
    rows = [routing.simulated(run, seed=3) for run in routing.runs_of(is_quick=True)]
    data = {"model": "llama-3.1-8b", "device": "h100", "rows": rows}
    assert len(rows) == 6
    assert "simulated" in routing.CLAIM.verdict(data).ours
    assert "Simulated, not measured" in routing.CLAIM.conditions(data)
    assert [row[0] for row in routing.CLAIM.tables(data)[0].rows][-2:] == ["2, oracle", "2, cost, 500 ms old"]


def test_the_large_fleet_is_simulated_with_few_choices() -> None:
    runs = routing.runs_of(is_quick=False)
    assert [run.routing for run in runs if run.num_replicas == 1000] == ["round-robin", "ring", "cost"]
    assert len({run for run in runs if run.num_replicas == 64}) == 6
