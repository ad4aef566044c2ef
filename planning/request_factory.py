"""Makes the requests of a simulation: token ids are numbers without a meaning, except that equal ones can be shared."""

from planning.server import Server
from planning.workload import Job
from scheduler.core import ReceivedOutput, Request, SequenceParams

SHARED_TOKENS_FROM = 1 << 31
"""First token id of system prompts. Lower ids belong to a single request."""

MAX_SYSTEM_PROMPTS = 1 << 20

MAX_TENANTS = ((1 << 32) - SHARED_TOKENS_FROM) // MAX_SYSTEM_PROMPTS
"""Most tenants. Each has ids of its own for its system prompts, and a token id has 32 bits."""


class RequestFactory:
    """Makes requests whose prompts share only the system prompt with others. Keeps one object for equal parameters."""

    def __init__(self, server: Server) -> None:
        self._tenant_of = server.tenant_of
        self._params: dict[int, SequenceParams] = {}

    def make(self, request_id: int, job: Job, num_received: int = 0) -> Request:
        """Returns the request of a job; `num_received` tokens of its output have been received before."""
        num_own = job.num_prompt_tokens - job.num_shared_tokens
        shared = SHARED_TOKENS_FROM + MAX_SYSTEM_PROMPTS * job.tenant + job.system_prompt
        prompt = [shared] * job.num_shared_tokens + [request_id] * num_own
        max_total = job.num_prompt_tokens + job.num_output_tokens
        params = self._params.get(max_total)
        if params is None:
            params = self._params[max_total] = SequenceParams(max_total_tokens=max_total)
        outputs = (ReceivedOutput([0] * num_received),) if num_received else ()
        tenant = self._tenant_of(job.tenant)
        return Request(request_id, prompt, params, priority=job.priority, outputs=outputs, tenant=tenant)
