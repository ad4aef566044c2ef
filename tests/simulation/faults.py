"""Draws the faults of a world from its seed."""

from __future__ import annotations

import errno
from collections import Counter
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from executor.errors import ModelBroken
from executor.plans import plan_wire as executor_wire
from executor.stream.leases import Leases
from quire.executor.v1 import executor_pb2 as pb
from scheduler.core import FinishReason, Scheduler
from scheduler.engine import plan_wire
from scheduler.engine.dispatcher import EventDispatcher
from scheduler.requests.completion import Completion
from scheduler.requests.intake import Intake
from scheduler.requests.response_stream import ResponseStream
from scheduler.requests.validation import RequestChecker
from scheduler.requests.write_queue import WriteQueue
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.telemetry.request_metrics import RequestMetrics
from tests.simulation.processes import CURRENT
from tests.simulation.requests import FIRST_OWN_TOKEN
from tests.simulation.transport import Wire

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Iterator
    from random import Random

    from scheduler.requests.intake import CheckedRequest
    from scheduler.requests.request_fields import RequestFields
    from tests.simulation.world import World
    from tests.support.core.fake_executor import Slot

CHECKED: ContextVar[str] = ContextVar("CHECKED", default="")
"""The name of the request that the current task checks or serves. What a resumption replays has no stream yet."""

ALL, ONE, NONE = "all requests may fail", "its own request may fail", "no request may fail"

METHODS: dict[str, tuple[object, str, str]] = {
    **{
        f"core: {name}": (Scheduler, name, ALL)
        for name in ("add", "cancel", "commit", "executor_attached", "executor_lost", "expire", "schedule", "stop")
    },
    "engine: dispatch": (EventDispatcher, "dispatch", ALL),
    "engine: encode a plan": (plan_wire, "encode_plan", ALL),
    "engine: decode a result": (plan_wire, "decode_result", NONE),
    "engine: begin a stream": (Wire, "begin_stream", ALL),
    "intake: check": (RequestChecker, "complete", ONE),
    "stream: started": (ResponseStream, "started", ONE),
    "stream: tokens": (Completion, "add", ONE),
    "stream: text": (Completion, "take", ONE),
    "stream: finished": (Completion, "finish", ONE),
    "stream: close": (ResponseStream, "close", ONE),
    "metrics: queued": (SchedulerMetrics, "queued", ONE),
    "metrics: tokens": (RequestMetrics, "tokens", ONE),
    "metrics: finished": (RequestMetrics, "finished", ONE),
    "metrics: ended": (RequestMetrics, "ended", ONE),
    "executor: decode a plan": (executor_wire, "plan_from_message", NONE),
    "executor: encode a result": (executor_wire, "output_to_message", NONE),
    "executor: grant": (Leases, "grant", NONE),
}
"""Functions that may raise an error that nothing expects, and which requests may fail then."""

OTHERS = {
    "client: write": ONE,
    "engine: observer of plans": NONE,
    "engine: observer of the state": NONE,
    "executor: execute": NONE,
    "executor: finish": NONE,
    "executor: is sane": NONE,
    "executor: observe": NONE,
    "executor: reset": NONE,
}
"""Places in the simulated parts."""

SCOPES = {name: scope for name, (_, _, scope) in METHODS.items()} | OTHERS


def an_error(random: Random) -> Callable[[], Exception]:
    return random.choice(
        (
            lambda: MemoryError(),
            lambda: OSError(errno.EMFILE, "Too many open files"),
            lambda: OSError(errno.ENOSPC, "No space left on device"),
            lambda: KeyError("unforeseen"),
        )
    )


@dataclass(frozen=True, slots=True)
class Fired:
    """An error that was raised, with its place, its time, and the request that it belongs to; "" for none."""

    place: str
    time_s: float
    who: str


@dataclass
class Faults:
    """The faults of one world.

    errors   (place, number of the call) that raises
    spoilt   clients whose logits are not finite from this number of tokens on
    garbled  numbers of the results that arrive malformed, and how
    poison   number of the client whose steps fail; None: none
    poisons_decodes  only those that compute more than the tokens with which it was admitted
    leaver   number of the turn to write at which a client cancels, in the same turn of the loop; 0: none
    """

    world: World
    errors: dict[tuple[str, int], Callable[[], Exception]] = field(default_factory=dict)
    spoilt: dict[int, int] = field(default_factory=dict)
    garbled: dict[int, str] = field(default_factory=dict)
    poison: int | None = None
    poisons_decodes: bool = False
    leaver: int = 0
    fired: list[Fired] = field(default_factory=list)
    is_over: bool = False
    has_garbled: int = 0

    def __post_init__(self) -> None:
        random, self._num_calls, self._num_results = self.world.random, Counter[str](), 0
        self._streams: list[ResponseStream] = []
        self.failed_s: dict[str, float] = {}  # when the engine failed a request, by its name
        for _ in range(random.choice((0, 0, 1, 1, 2, 4))):
            place, number = random.choice(list(SCOPES)), random.choice((1, 2, random.randint(1, 10)))
            error = an_error(random)
            if place in ("executor: execute", "executor: finish") and random.random() < 0.3:
                error = lambda: ModelBroken("the weights are not finite")  # noqa: E731
            self.errors[place, number] = error
        if random.random() < 0.1:
            self.spoilt[random.randrange(self.world.num_clients)] = random.randint(0, 20)
        for _ in range(random.choice((0, 0, 0, 1, 3))):
            self.garbled[random.randint(1, 30)] = random.choice(list(GARBLERS))
        if random.random() < 0.2:
            self.leaver = random.randint(1, 20)
        if random.random() < 0.1:
            self.poison = random.randrange(self.world.num_clients)
            self.poisons_decodes = random.random() < 0.5
            self.world.lines.append(f"client {self.poison} is poison" + " when it decodes" * self.poisons_decodes)

    def may_raise(self, place: str, who: Callable[[], str] | None = None) -> None:
        """Raises the drawn error, if there is one for this call."""
        if (process := CURRENT.get()) is not None and not process.is_alive:
            return
        self._num_calls[place] += 1
        error = self.errors.get((place, self._num_calls[place]))
        if error is not None and not self.is_over:
            self.fired.append(Fired(place, self.world.now_s, who() if who else ""))
            self.world.log(f"fault: {place} raises {error()!r}")
            raise error()

    def spoils(self, last_prompt_token: int, num_tokens: int) -> bool:
        """Returns whether the row of a client's sequence is not finite."""
        number = last_prompt_token - FIRST_OWN_TOKEN
        return not self.is_over and number in self.spoilt and num_tokens > self.spoilt[number]

    def poisons(self, slots: Iterable[Slot]) -> bool:
        """Returns whether one of the sequences in a batch makes its step fail."""
        if self.poison is None or self.is_over:
            return False
        token_id = FIRST_OWN_TOKEN + self.poison
        own = [slot for slot in slots if slot.token_ids[slot.num_prompt_tokens - 1] == token_id]
        if self.poisons_decodes:
            own = [slot for slot in own if slot.num_computed_tokens > slot.num_admitted_tokens]
        if not own:
            return False
        self.world.oracles.step_poisoned()
        return True

    def encode(self, response: pb.RunResponse) -> bytes:
        """Returns a response of the executor as it arrives."""
        if response.HasField("result") and not self.is_over:
            self._num_results += 1
            if (kind := self.garbled.get(self._num_results)) is not None:
                self.has_garbled += 1
                self.world.log(f"fault: result {self._num_results} arrives with {kind}")
                response = pb.RunResponse.FromString(response.SerializeToString())
                garbled = GARBLERS[kind](response.result)
                return garbled if isinstance(garbled, bytes) else response.SerializeToString()
        return response.SerializeToString()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the functions in METHODS raise what was drawn for them."""
        begin = ResponseStream.__init__

        def begin_noted(stream: ResponseStream, *arguments: Any) -> None:
            self._streams.append(stream)
            begin(stream, *arguments)

        lose = Scheduler.executor_lost

        def lose_noted(core: Scheduler, now_s: float) -> Any:
            if core.is_attached:
                self.world.oracles.executor_lost()
            return lose(core, now_s)

        admit = WriteQueue._admit

        def admit_and_cancel(queue: WriteQueue, turn: asyncio.Future[int]) -> None:
            admit(queue, turn)
            self.leaver -= 1
            if not self.leaver and not self.is_over:
                name = next((stream.log_fields["request_id"] for stream in self._streams if stream._turn is turn), "")
                next(client for client in self.world.clients if client.name == name).leave()

        finished = ResponseStream.finished

        def finished_noted(stream: ResponseStream, index: int, reason: FinishReason, *arguments: Any) -> None:
            if reason is FinishReason.ERROR:
                self.failed_s.setdefault(stream.log_fields["request_id"], self.world.now_s)
            finished(stream, index, reason, *arguments)

        check = Intake._check

        async def check_noted(intake: Intake, fields: RequestFields, *arguments: Any) -> CheckedRequest:
            CHECKED.set(fields.get("request_id"))
            return await check(intake, fields, *arguments)

        with ExitStack() as patches:
            patches.enter_context(patch.object(Intake, "_check", check_noted))
            patches.enter_context(patch.object(ResponseStream, "finished", finished_noted))
            patches.enter_context(patch.object(WriteQueue, "_admit", admit_and_cancel))
            patches.enter_context(patch.object(Scheduler, "executor_lost", lose_noted))
            patches.enter_context(patch.object(ResponseStream, "__init__", begin_noted))
            for place in dict.fromkeys(place for place, _ in self.errors):
                if place in METHODS:
                    owner, name, scope = METHODS[place]
                    broken = self._broken(place, getattr(owner, name), scope)
                    patches.enter_context(patch.object(owner, name, broken))
            yield

    def _broken(self, place: str, whole: Callable[..., Any], scope: str) -> Callable[..., Any]:
        def broken(*arguments: Any, **options: Any) -> Any:
            self.may_raise(place, (lambda: self._request_of(arguments)) if scope is ONE else None)
            return whole(*arguments, **options)

        return broken

    def _request_of(self, arguments: tuple[Any, ...]) -> str:
        """Returns the id of the request for which a function was called."""
        owner = arguments[0]
        match owner:
            case SchedulerMetrics():
                return str(arguments[2].exemplar.get("request_id", ""))
            case RequestChecker():
                return str(owner._client_request_id)
            case RequestMetrics():
                return owner.exemplar.get("request_id", "")
            case Completion():
                names = (
                    str(stream.log_fields["request_id"]) for stream in self._streams if owner in stream._completions
                )
                return next(names, CHECKED.get())
        return str(owner.log_fields["request_id"])


def _set(**values: Any) -> Callable[[pb.StepResult], None]:
    def garble(result: pb.StepResult) -> None:
        for name, value in values.items():
            setattr(result, name, value)

    return garble


def _short(num_bytes: int) -> Callable[[pb.StepResult], None]:
    def garble(result: pb.StepResult) -> None:
        result.token_ids = result.token_ids[:-num_bytes] if result.token_ids else b"\1" * num_bytes

    return garble


def _more(result: pb.StepResult) -> None:
    result.token_ids += bytes(4)


def _foreign(result: pb.StepResult) -> None:
    result.token_ids = b"\xff\xff\xff\x7f" * (len(result.token_ids) // 4)


GARBLERS: dict[str, Callable[[pb.StepResult], bytes | None]] = {
    "a token less": _short(4),
    "half a token less": _short(2),
    "a token more": _more,
    "another step": _set(step_id=77),
    "another lease": _set(epoch=2**63),
    "an unknown end reason": _set(end_reasons=b"\x63"),
    "tokens outside the vocabulary": _foreign,
    "noise": lambda result: b"\xff\xfe\xfd",
}
