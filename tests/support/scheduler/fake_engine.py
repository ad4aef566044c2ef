"""An engine with the interface and guarantees of `scheduler.engine.engine.Engine`; a test scripts its output."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from scheduler.core import (
    BlockMap,
    BlockRun,
    BlockState,
    CapacityExceeded,
    FinishReason,
    KVUsage,
    Request,
    Scheduler,
    SchedulerLimits,
    SequenceView,
    TokenLogprobs,
    Unavailable,
)
from scheduler.engine.dispatcher import Sink
from scheduler.engine.engine import ServerState
from scheduler.engine.failures import Failures
from scheduler.engine.model_description import ModelDescription
from scheduler.engine.withdrawals import Withdrawals

MODEL = ModelDescription(
    model_name="tiny",
    dtype="float32",
    device="cpu",
    vocab_size=400,
    max_model_len=100_000,
    block_size=16,
    num_blocks=3,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)


@dataclass
class Submitted:
    """A submitted request. `done` holds the indices of the sequences that have ended."""

    request: Request
    sink: Sink
    was_cancelled: bool = False
    done: set[int] = field(default_factory=set)
    stopped: list[int] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        beam = self.request.beam
        num_results = self.request.num_sequences if beam is None else beam.num_returned
        return not self.was_cancelled and len(self.done) < num_results

    def start(self, num_cached_tokens: int = 0) -> "Submitted":
        self.sink.started(num_cached_tokens)
        return self

    def emit(self, token_ids: list[int], index: int = 0) -> None:
        """Sends tokens to the sink one by one, like the engine, with made-up log-probabilities if they were requested.

        Does nothing if the sequence has ended.
        """
        num_logprobs = self.request.params.num_logprobs
        for token_id in token_ids:
            if self.is_open and index not in self.done:
                if num_logprobs:
                    self.sink.tokens(index, [token_id], [made_up_logprobs(token_id, num_logprobs)])
                else:
                    self.sink.tokens(index, [token_id])

    def finish(self, reason: FinishReason = FinishReason.LENGTH, index: int = 0, num_preemptions: int = 0) -> None:
        if self.is_open and index not in self.done:
            self.done.add(index)
            self.sink.finished(index, reason, num_preemptions)

    def emit_beams(self, beams: list[tuple[list[int], float]]) -> None:
        """Sends the whole result of a beam search at once, like the engine."""
        for index, (token_ids, score) in enumerate(beams):
            self.done.add(index)
            self.sink.tokens(index, token_ids)
            self.sink.finished(index, FinishReason.LENGTH, 0, score)


def made_up_logprobs(token_id: int, num_logprobs: int) -> TokenLogprobs:
    """Returns log-probabilities that differ for each token and are exact in float32."""
    top = list(range(1, num_logprobs))
    return TokenLogprobs(
        [token_id, *top], [-token_id / 8, *(-rank / 4 for rank in top)], [token_id + 1, *range(1, num_logprobs)]
    )


class FakeEngine:
    """A fake engine. `submitted` has all requests; `refusal`, if set, is raised instead of accepting one, and
    `lateness` before it is read."""

    def __init__(self, model: ModelDescription | None = MODEL) -> None:
        self._model = model
        self._state = ServerState.SERVING
        self._callbacks: list[Callable[[ServerState], None]] = []
        self._idle = asyncio.Event()
        self.max_prompt_and_output = model.max_model_len if model else 0
        self.submitted: dict[int, Submitted] = {}
        self._num_requests = 0
        self._arrived: asyncio.Queue[Submitted] = asyncio.Queue()
        self.refusal: Exception | None = None
        self.lateness: Exception | None = None
        self.checked_deadlines: list[tuple[str, float | None, float, int]] = []
        self.trouble = ""
        self.traces: tuple[()] = ()
        self.withdrawals = Withdrawals()
        self.failures = Failures()
        self.oldest_waiting_s = 0.0
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
        self.core: Scheduler | None = Scheduler(limits, num_blocks=4, block_size=16) if model else None

    # --- the engine's interface ---------------------------------------------------------------------------------

    @property
    def state(self) -> ServerState:
        return self._state

    @property
    def is_ready(self) -> bool:
        return self._state is ServerState.SERVING

    @property
    def readiness(self) -> str:
        return f"{self._state.value}: {self.trouble}" if self.trouble else self._state.value

    @property
    def description(self) -> ModelDescription:
        if self._model is None:
            raise Unavailable("no executor has described itself yet")
        return self._model

    def new_request_id(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def check_deadline(self, tenant: str, deadline_s: float | None, max_tokens: float, priority: int) -> None:
        """Raises `lateness` if it is set."""
        self.checked_deadlines.append((tenant, deadline_s, max_tokens, priority))
        if self.lateness is not None:
            raise self.lateness

    def submit(self, request: Request, sink: Sink) -> None:
        if self._state is ServerState.DRAINING:
            raise Unavailable("the server is draining")
        if self.refusal is not None:
            raise self.refusal
        if request.params.max_total_tokens > self.max_prompt_and_output:
            raise CapacityExceeded("the fake engine holds less")
        submitted = Submitted(request, sink)
        self.submitted[request.request_id] = submitted
        self._arrived.put_nowait(submitted)

    def cancel(self, request_id: int) -> None:
        submitted = self.submitted.get(request_id)
        if submitted is not None and submitted.is_open:
            submitted.was_cancelled = True
        self._check_idle()

    def stop(self, request_id: int, index: int) -> None:
        submitted = self.submitted[request_id]
        submitted.stopped.append(index)
        submitted.finish(FinishReason.STOP, index)

    def block_map(self, *, summary_only: bool = False) -> BlockMap:
        _ = self.description
        blocks = [
            BlockRun(BlockState.ACTIVE, 2, 0),
            BlockRun(BlockState.CACHED, 0, 3),
            BlockRun(BlockState.FREE, 0, 0, length=40),
        ]
        sequences = [
            SequenceView(
                request_id=request_id,
                index=0,
                slot=-1,
                num_prompt_tokens=3,
                num_tokens=5,
                num_computed_tokens=4,
                block_table=(2, 1),
            )
            for request_id, submitted in self.submitted.items()
            if submitted.is_open
        ]
        if summary_only:
            blocks, sequences = [], []
        return BlockMap(16, blocks, sequences, 7, 70, 12, 5, 6, 2, self.kv_usage())

    def kv_usage(self) -> KVUsage:
        return KVUsage(1, 1, 1, 0, 12, 4)

    def reset_prefix_cache(self) -> int:
        _ = self.description
        return 9

    async def drain(self) -> None:
        self.become(ServerState.DRAINING)
        self._check_idle()
        await self._idle.wait()

    def resume(self) -> None:
        self.become(ServerState.SERVING)

    def on_state_change(self, callback: Callable[[ServerState], None]) -> None:
        self._callbacks.append(callback)

    # --- a test's interface -----------------------------------------------------------------------------------------

    def become(self, state: ServerState) -> None:
        if state is not self._state:
            self._state = state
            for callback in self._callbacks:
                callback(state)

    def limit(self, max_prompt_and_output: int) -> None:
        self.max_prompt_and_output = max_prompt_and_output
        self._model = replace(self.description, max_model_len=max_prompt_and_output)

    async def next_request(self) -> Submitted:
        """Returns the next request that was submitted; each is returned once."""
        return await asyncio.wait_for(self._arrived.get(), 30)

    def _check_idle(self) -> None:
        if not any(submitted.is_open for submitted in self.submitted.values()):
            self._idle.set()
