"""A scheduler or an executor that records nothing about its requests and steps, and logs errors only.

    python -m bench.overhead.unobserved scheduler --model DIR --executor HOST:PORT

The flags are fields of the service's configuration. `bench observability-cost` uses it as the baseline: its metrics
stay zero. The recorders are replaced here, so that the product needs no switch to turn them off.
"""

import sys
from collections.abc import Sequence
from typing import Any


def blind_scheduler() -> None:
    """Replaces the scheduler's recorders by ones that do nothing."""
    from scheduler import main as scheduler_main
    from scheduler.live.plan_log import PlanLog
    from scheduler.requests import intake
    from scheduler.telemetry.metrics import SchedulerMetrics
    from scheduler.telemetry.request_metrics import RequestMetrics
    from scheduler.telemetry.request_observer import ObservedRequest, RequestObserver

    class BlindRequest(RequestMetrics):
        """A request whose events are not measured."""

        num_tokens = 0
        has_ended = True

        def __init__(self) -> None:
            self.exemplar = {}

        def admitted(self) -> None:
            pass

        def started(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
            pass

        def tokens(self, index: int, num_tokens: int) -> None:
            pass

        def finished(self, index: int, reason: object, num_tokens: int, num_preemptions: int = 0) -> None:
            pass

        def ended(self, reason: object) -> None:
            pass

    class BlindObservation(ObservedRequest):
        """A request without a log line, a trace or an exemplar."""

        def __init__(self, arrival_s: float) -> None:
            self.arrival_s = arrival_s

        def refused(self, code: str) -> None:
            pass

        def admitted(self, facts: object) -> RequestMetrics:
            return BlindRequest()

        def queued(self, request: object) -> None:
            pass

    class BlindObserver(RequestObserver):
        def arrived(self, caller: object, *, request_id: object, is_chat: bool) -> ObservedRequest:
            return BlindObservation(self.metrics.clock())

    class BlindMetrics(SchedulerMetrics):
        def planned(self, plan: object, duration_s: float) -> None:
            pass

    class BlindPlanLog(PlanLog):
        def planned(self, core: object, plan: object) -> None:
            pass

    for module, name, blind in (
        (intake, "RequestObserver", BlindObserver),
        (scheduler_main, "SchedulerMetrics", BlindMetrics),
        (scheduler_main, "PlanLog", BlindPlanLog),
    ):
        if not hasattr(module, name):
            raise RuntimeError(f"{module.__name__} no longer has {name}: both sides would be the same")
        setattr(module, name, blind)


def blind_executor() -> None:
    """Replaces the executor's recorder of steps by one that does nothing."""
    from executor.metrics import Metrics

    def ignore(self: Metrics, timings: object) -> None:
        pass

    Metrics.observe_step = ignore  # type: ignore[method-assign]


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Turns ["--num-blocks", "4096", "--model", "DIR"] into {"num_blocks": 4096, "model": "DIR"}."""
    names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
    return {name: int(text) if text.isdecimal() else text for name, text in zip(names, words[1::2], strict=True)}


def main() -> int:
    service, *words = sys.argv[1:]
    if service == "scheduler":
        blind_scheduler()
        from scheduler.config import SchedulerConfig
        from scheduler.main import run as run_scheduler

        return run_scheduler(SchedulerConfig.from_dict(parse(words)))
    blind_executor()
    from executor.config import ExecutorConfig
    from executor.main import run as run_executor

    return run_executor(ExecutorConfig.from_dict(parse(words)))


if __name__ == "__main__":
    sys.exit(main())
