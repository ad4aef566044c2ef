from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from deploy.reference import fetched
from quire import InvalidRequestError
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


@pytest.fixture(scope="session")
def observed() -> Iterator[Observed]:
    """Starts a server that has served one request and refused another."""
    with Stack(num_blocks=48, max_num_seqs=16) as stack, stack.sync_client() as client:
        words = dict(word.split("=", 1) for word in stack.serve.line("ready ").split() if "=" in word)
        client.complete("Once upon a time", max_tokens=2)
        with pytest.raises(InvalidRequestError):
            client.complete("Once upon a time", temperature=-1.0)
        yield Observed(stack, words["http"], words["metrics"])
