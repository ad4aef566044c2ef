"""Who is told of each plan, besides the executor: metrics, the live page."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler.core import Scheduler, StepPlan

    PlanObserver = Callable[[Scheduler, StepPlan, float], None]

log = logging.getLogger(__name__)


def harmless(observer: PlanObserver) -> PlanObserver:
    """The same, but for what it raises: that goes to the log, and the engine goes on. Once for failures in a row: there
    is a plan every few milliseconds."""
    is_failing = False

    def told(core: Scheduler, plan: StepPlan, duration_s: float) -> None:
        nonlocal is_failing
        try:
            observer(core, plan, duration_s)
            is_failing = False
        except Exception:
            if not is_failing:
                log.exception("an observer of plans failed")
            is_failing = True

    return told
