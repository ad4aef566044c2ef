"""The continuous baseline: the continuous batching of transformers in a closed loop.

`generate_batch` gives all requests one length and takes them all at once. The manager behind it has a thread of its own
and takes requests one by one, each with its length. A closed loop feeds that manager, as it feeds a server.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.load import LoadError, LoadResult, RequestRecord, checked_record
from bench.trace import TraceRequest

_POLL_S = 1.0
_MAX_WAIT_S = 60.0
_STOP_TIMEOUT_S = 5.0  # the value that generate_batch uses


class ContinuousBatches:
    """A transformers model that is already on its device. Each run has its own manager and KV cache."""

    def __init__(self, model: Any, limits: Mapping[str, int] | None = None) -> None:
        """Keeps the model.

        limits  fields of ContinuousBatchingConfig; None: it takes what the device's memory allows
        """
        self._model = model
        self._limits = dict(limits or {})

    def run(self, trace: Sequence[TraceRequest], concurrency: int) -> LoadResult:
        """Runs the trace. The manager's own warm-up is not part of the time. Raises LoadError."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        limits: dict[str, Any] = self._limits
        settings = ContinuousBatchingConfig(**limits)
        greedy = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=max(request.max_tokens for request in trace),
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        with self._model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=settings, timeout=_STOP_TIMEOUT_S
        ) as manager:
            return _closed_loop(manager, trace, concurrency)


def _closed_loop(manager: Any, trace: Sequence[TraceRequest], concurrency: int) -> LoadResult:
    sent: dict[str, tuple[TraceRequest, float]] = {}
    remaining = iter(trace)

    def send() -> None:
        if (request := next(remaining, None)) is not None:
            sent_s = time.perf_counter()
            request_id = manager.add_request(
                list(request.prompt_token_ids),
                max_new_tokens=request.max_tokens,
                record_timestamps=True,
                eos_token_id=-1,
            )
            sent[request_id] = (request, sent_s)

    started_s = time.perf_counter()
    for _ in range(concurrency):
        send()
    records = []
    while sent:
        records.append(_next_record(manager, sent))
        send()
    return LoadResult(concurrency, time.perf_counter() - started_s, tuple(records))


def _next_record(manager: Any, sent: dict[str, tuple[TraceRequest, float]]) -> RequestRecord:
    """Waits for a request to end."""
    give_up_s = time.perf_counter() + _MAX_WAIT_S
    while time.perf_counter() < give_up_s:
        result = manager.get_result(timeout=_POLL_S)
        if result is None:
            if not manager.is_running():
                raise LoadError("transformers: the thread that generates has ended")
        elif result.error is not None:
            raise LoadError(f"transformers: {result.error}")
        elif result.is_finished():
            request, sent_s = sent.pop(result.request_id)
            return checked_record(request, sent_s, result.timestamps or [], len(result.generated_tokens))
    raise LoadError(f"transformers: no request ended within {_MAX_WAIT_S:g} s")
