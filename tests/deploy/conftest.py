from collections.abc import Iterator

import pytest

from quire import InvalidRequestError
from tests.support.deploy.observed import Observed
from tests.support.e2e.stack import Stack


@pytest.fixture(scope="session")
def observed() -> Iterator[Observed]:
    """Starts a server that has served one request and refused another."""
    stack = Stack(num_blocks=48, max_num_seqs=16, gateway=True, gateway_listen="127.0.0.1:0")
    with stack, stack.sync_client() as client:
        words = dict(word.split("=", 1) for word in stack.serve.line("ready ").split() if "=" in word)
        client.complete("Once upon a time", max_tokens=2)
        with pytest.raises(InvalidRequestError):
            client.complete("Once upon a time", temperature=-1.0)
        yield Observed(stack, words["http"], words["metrics"])
