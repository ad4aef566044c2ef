"""The series of a running server, as Prometheus reads them."""

from dataclasses import dataclass

from deploy.reference import fetched
from tests.support.e2e.stack import Stack


@dataclass(frozen=True, slots=True)
class Observed:
    """A server whose pool is too small for its load, and the addresses of its two pages of metrics."""

    stack: Stack
    scheduler_metrics: str
    executor_metrics: str

    def pages(self) -> tuple[str, str]:
        """Returns the pages that Prometheus would scrape now."""
        return fetched(self.scheduler_metrics), fetched(self.executor_metrics)
