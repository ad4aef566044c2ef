"""A scheduler or an executor that records nothing of its requests and steps, and logs errors only.

    python -m bench.unobserved scheduler --model … --executor …           # as `quire scheduler`, and `quire executor`

It is what `bench.observability_cost` compares with, and good for nothing else: its metrics stay zero. The recorders are
replaced here, by ones that do nothing, so that the product needs no switch that nobody should turn.
"""

import sys

from quire.cli.main import main


def blind_scheduler() -> None:
    from scheduler import main as scheduler_main
    from scheduler.live.plan_log import PlanLog
    from scheduler.requests import intake
    from scheduler.telemetry.metrics import SchedulerMetrics

    class Unseen:
        """Of a request: no line, no trace, no exemplar; its metrics are no recorder."""

        def __init__(self, metrics: SchedulerMetrics, tracer: object = None) -> None:
            self.exemplar: dict[str, str] = {}

        def arrived(self, caller: object, *, request_id: object, is_chat: bool) -> "Unseen":
            return self

        def refused(self, code: str) -> None:
            pass

        def admitted(self, facts: object) -> "Unseen":
            return self

        def queued(self, request: object) -> None:
            pass

        def started(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
            pass

        def tokens(self, index: int, num_tokens: int) -> None:
            pass

        def finished(self, index: int, reason: object, num_tokens: int, num_preemptions: int = 0) -> None:
            pass

        def ended(self, reason: object) -> None:
            pass

    class UnrecordedSteps(SchedulerMetrics):
        def planned(self, plan: object, duration_s: float) -> None:
            pass

    class UnrecordedPlans(PlanLog):
        def planned(self, core: object, plan: object) -> None:
            pass

    for module, name, blind in (
        (intake, "RequestObserver", Unseen),
        (scheduler_main, "SchedulerMetrics", UnrecordedSteps),
        (scheduler_main, "PlanLog", UnrecordedPlans),
    ):
        if not hasattr(module, name):
            raise RuntimeError(f"{module.__name__} has no {name} any more: nothing would be compared")
        setattr(module, name, blind)


def blind_executor() -> None:
    from executor.metrics import Metrics

    def ignore(self: Metrics, timings: object) -> None:
        pass

    Metrics.observe_step = ignore  # type: ignore[method-assign]


if __name__ == "__main__":
    {"scheduler": blind_scheduler, "executor": blind_executor}[sys.argv[1]]()
    main()
