"""Attaches the engine to an executor: finds out what it is, decides whether it can be used, and gets its lease."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.plan_stream import OPTIONAL_FEATURES
from scheduler.core import ExecutorNotOurs, FinishReason
from scheduler.core.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler.core import Scheduler
    from scheduler.engine.dispatcher import EventDispatcher
    from scheduler.engine.executor_client import ExecutorClient, PlanStream
    from scheduler.engine.model_description import ModelDescription
    from scheduler.engine.options import EngineOptions
    from scheduler.engine.plan_wire import ExecutorDescription

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A plan stream with a lease, the model behind it, and the blocks of its pool, including the null block."""

    stream: PlanStream
    model: ModelDescription
    num_blocks: int


async def attach(
    client: ExecutorClient,
    options: EngineOptions,
    known: ModelDescription | None,
    epoch: int,
    on_arrival: Callable[[], None],
) -> Attachment:
    """Waits for an executor and its lease.

    known   the model that is served; None: the first executor determines it
    epoch   the core's epoch. The core numbers its epochs itself, because a restarted executor begins its leases at 1

    Raises ExecutorLost if there is no executor, and ExecutorNotOurs if it cannot be used.
    """
    description = await client.find(options.describe_timeout_s)
    model = options.narrowed(description)
    if known is not None and (differences := known.differences(model)):
        changes = ", and ".join(differences)
        raise ExecutorNotOurs(f"the executor now has {changes}: restart the scheduler to take it")
    stream = await client.open_stream(
        on_arrival,
        epoch,
        description.incarnation,
        options.describe_timeout_s,
        digest_scheme=_digest_scheme(description) if options.keeps_prefixes else "",
        num_blocks=description.num_blocks,
    )
    if stream.retained is not None:
        log.info("the executor has retained %d blocks of the prefix cache", len(stream.retained))
    return Attachment(stream, model, description.num_blocks)


def _digest_scheme(executor: ExecutorDescription) -> str:
    """Returns the name of our digests with all that the KV of a block depends on, beside the tokens before its end.

    Returns an empty name for an executor that retains no blocks.
    """
    if not set(OPTIONAL_FEATURES) <= set(executor.features):
        log.info("this executor retains no blocks: after a restart of the scheduler, the prefix cache will be empty")
        return ""
    return (
        f"{PrefixIndex.SCHEME}, model {executor.model_name}, weights {executor.weights_digest}, "
        f"dtype {executor.dtype}, {executor.num_blocks} blocks of {executor.block_size}"
    )


def fail_stranded_requests(
    core: Scheduler, dispatcher: EventDispatcher, known: ModelDescription, new: ModelDescription
) -> bool:
    """Fails the requests that cannot go on with a new executor. Returns False if there was no reason to."""
    has_other_weights = known.weights_digest != new.weights_digest
    has_lost_grammars = known.has_grammars and not new.has_grammars
    if has_other_weights:
        _fail_requests_with_output(core, dispatcher)
    if has_lost_grammars:
        _fail_requests_with_grammar(core, dispatcher)
    return has_other_weights or has_lost_grammars


def _fail_requests_with_grammar(core: Scheduler, dispatcher: EventDispatcher) -> None:
    log.error("this executor cannot follow grammars, unlike the one before: requests with structured output fail")
    with_grammar = [request_id for request_id, active in core.state.requests.items() if active.request.params.grammar]
    for request_id in with_grammar:
        dispatcher.fail(request_id, FinishReason.ERROR)
        core.cancel(request_id)


def _fail_requests_with_output(core: Scheduler, dispatcher: EventDispatcher) -> None:
    """Fails the requests that cannot go on with other weights: all they report must come from one model.

    A request that has started may also have told its client which weights it has (`Continuation.model_digest`), and a
    resumed one has begun with them.
    """
    log.error("the executor has other weights under the same name: requests that have output fail")
    with_output = [
        request_id
        for request_id, active in core.state.requests.items()
        if active.has_started or active.request.is_resumed
    ]
    for request_id in with_output:
        dispatcher.fail(request_id, FinishReason.MODEL_CHANGED)
        core.cancel(request_id)
