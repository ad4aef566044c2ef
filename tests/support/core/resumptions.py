"""Resumes requests whose streams broke off, as the validator of the scheduler does."""

from dataclasses import replace

from scheduler.core import ReceivedOutput, Request, Scheduler
from tests.support.core.fake_clients import FakeClients


def resumption(clients: FakeClients, request_id: int) -> Request | None:
    """Returns a request for the rest of a request's output; None if its client has everything."""
    request = clients.requests[request_id]
    if not clients.open_keys(request_id):
        return None
    if request.beam:
        return replace(request, is_resumed=True)
    keys = [(request_id, index) for index in range(request.num_sequences)]
    outputs = tuple(ReceivedOutput(tuple(clients.received[key]), key in clients.ended) for key in keys)
    has_output = any(output.token_ids for output in outputs)
    return replace(
        request,
        outputs=outputs if has_output else (),
        is_resumed=True,
        num_prompt_reported=clients.num_prompt_logprobs.get(request_id, 0),
    )


def arrived(request: Request, request_id: int, scheduler: Scheduler) -> Request | None:
    """Returns a resumed request as it arrives at a scheduler; None if no sequence is left to continue.

    The pool bounds an open-ended request anew, and ends its sequences that have reached the bound.
    """
    params, num_prompt_tokens = request.params, len(request.prompt_token_ids)
    if request.is_open_ended:
        params = replace(params, max_total_tokens=max(num_prompt_tokens + 1, scheduler.max_tokens_per_sequence))
    enough = max(params.max_total_tokens, params.min_total_tokens) - num_prompt_tokens
    outputs = tuple(
        replace(output, is_finished=output.is_finished or 0 < len(output.token_ids) >= enough)
        for output in request.outputs
    )
    if outputs and all(output.is_finished for output in outputs):
        return None
    return replace(request, request_id=request_id, params=params, outputs=outputs)
