"""Services that run separately are replaced by hand under load, and no stream loses or repeats a token."""

import pytest

from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import StreamGroup, differences, mixed_jobs, outcomes

JOBS = mixed_jobs(24)
SERVICES = ("scheduler", "executor")


@pytest.mark.exhaustive
async def test_services_that_run_separately_are_replaced_by_hand() -> None:
    """The steps of docs/operations.md: the executor first, then the scheduler, which drains for a moment only."""
    with Stack(apart=True, drain_timeout_s=0.2, max_num_seqs=sum(job.num_sequences for job in JOBS)) as stack:
        async with stack.client() as client:
            expected = await outcomes(client, JOBS)
            before = {service: stack.pid(service) for service in SERVICES}
            streams = StreamGroup(client, JOBS).start()
            await streams.until(lambda streams: streams.all_have(3))
            await stack.restart_executor()
            await stack.until_health("SERVING")
            assert streams.most_run
            await stack.restart_scheduler()
            assert differences(await streams.ended(), expected) == []
            assert client.num_resumptions > 0
        for service in SERVICES:
            assert stack.pid(service) not in (None, before[service])
