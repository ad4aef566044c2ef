"""Clients of the simulated scheduler: what they ask for, what they must receive, and how they read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import grpc

from quire.v1 import generation_pb2 as pb
from scheduler.core import FinishReason, SequenceParams
from scheduler.identity.identity import CALLER, Identity, Role
from scheduler.requests.response_stream import FINISH_REASONS
from scheduler.requests.seeds import sample_seed
from scheduler.text.tokenizer import Tokenizer
from tests.simulation.translation import seed_under
from tests.support.core.fake_executor import expected_output
from tests.support.scheduler import small_tokenizers

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.world import World

FIRST_OWN_TOKEN = 100
"""A prompt ends with this token plus the client's number, so that a fault can find the client's slots."""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(small_tokenizers.byte_level(), {})


@cache
def eos_token_id() -> int:
    return small_tokenizers.id_of(small_tokenizers.byte_level(), "</s>")


@dataclass(frozen=True, slots=True)
class Output:
    """The whole output of one sequence."""

    token_ids: list[int]
    text: str
    reason: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and what its client does. Times are in seconds of the loop's clock.

    read_s      mean time that the client takes for a message
    stalls_at   number of the message that the client does not read for `stall_s`; -1: none
    leaves_s    when the client cancels, after its arrival
    timeout_s   the client's deadline, after its arrival
    """

    number: int
    message: pb.GenerateRequest
    arrives_s: float
    read_s: float
    stalls_at: int
    stall_s: float
    leaves_s: float | None
    timeout_s: float | None

    @property
    def num_sequences(self) -> int:
        return self.message.sampling.n

    def expected(self, index: int, digest: str, vocab_size: int) -> Output:
        """Returns the undisturbed output of a sequence from the weights with this digest."""
        prompt, stopping = list(self.message.token_ids.ids), self.message.stopping
        params = SequenceParams(
            max_total_tokens=len(prompt) + stopping.max_tokens,
            eos_token_ids=() if stopping.ignore_eos else (eos_token_id(),),
            stop_token_ids=tuple(stopping.stop_token_ids),
        )
        seed = seed_under(digest, sample_seed(self.message.sampling.seed, index))
        token_ids, reason = expected_output(prompt, params, seed, vocab_size)
        return _cut(token_ids, reason, tuple(stopping.stop), {*params.eos_token_ids, *params.stop_token_ids})


def _cut(token_ids: list[int], reason: FinishReason, stops: tuple[str, ...], endings: set[int]) -> Output:
    """Returns the output up to the first stop string, if there is one."""
    detokenizer, text = tokenizer().detokenizer(continues_text=True), ""
    for number, token_id in enumerate(token_ids, 1):
        text += detokenizer.decode([] if number == len(token_ids) and token_id in endings else [token_id])
        if number == len(token_ids):
            text += detokenizer.flush()
        if places := [text.index(stop) for stop in stops if stop in text]:
            return Output(token_ids[:number], text[: min(places)], pb.FINISH_REASON_STOP)
    return Output(token_ids, text, FINISH_REASONS[reason])


def draw(random: Random, number: int, world: World) -> Asked:
    """Draws a request whose prompt often shares its head with others."""
    head = [1, 2, 3, 5, 8, 13, 21, 34][: random.choice((0, 4, 8))]
    tail = [random.randrange(50, 60) for _ in range(random.randint(0, 6))]
    most = world.max_tokens_per_sequence - len(head) - len(tail) - 1
    message = pb.GenerateRequest(
        request_id=f"client {number}",
        token_ids=pb.TokenIds(ids=[*head, *tail, FIRST_OWN_TOKEN + number]),
        sampling=pb.SamplingParams(seed=random.getrandbits(20), n=random.choice((1, 1, 1, 2, 3)), temperature=1.0),
        stopping=pb.StoppingParams(
            max_tokens=max(1, min(most, random.choice((1, 4, 12, 25)))),
            ignore_eos=random.random() < 0.5,
            stop_token_ids=[random.randrange(world.machine.vocab_size)] if random.random() < 0.2 else [],
        ),
    )
    message.sampling.n = min(message.sampling.n, world.machine.max_num_seqs)
    is_slow, leaves, hurries = random.random() < 0.15, random.random() < 0.25, random.random() < 0.15
    asked = Asked(
        number,
        message,
        arrives_s=random.uniform(0, 1.0),
        read_s=random.choice((0.0, 0.0, 0.001, 0.05)),
        stalls_at=random.randrange(8) if is_slow else -1,
        stall_s=random.choice((0.1, 1.5, 30.0)),
        leaves_s=random.choice((random.uniform(0, 0.01), random.uniform(0, 1))) if leaves else None,
        timeout_s=random.choice((random.uniform(0, 0.05), random.uniform(0, 3))) if hurries else None,
    )
    if random.random() < 0.4:
        text = asked.expected(random.randrange(message.sampling.n), "0", world.machine.vocab_size).text
        place = random.randrange(len(text)) if text else 0
        if stop := text[place : place + random.randint(1, 3)]:
            message.stopping.stop.append(stop)
    return asked


@dataclass(eq=False)
class Call:
    """One call of Generate. It is the context of the real servicer, and keeps what the client received."""

    world: World
    asked: Asked
    began_s: float = 0.0
    ended_s: float | None = None
    code: grpc.StatusCode | None = None
    details: str = ""
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, int] = field(default_factory=dict)
    num_messages: int = 0
    num_started: int = 0
    has_left: bool = False
    longest_stall_s: float = 0.0
    saw_no_core: bool = False
    serving: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.asked.message.request_id

    async def run(self) -> None:
        """Arrives, is served, and ends."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.asked.arrives_s)
        self.began_s, self.saw_no_core = loop.time(), self.world.engine.core is None
        serving = self.serving = asyncio.create_task(self._serve(), name=f"{self.name}'s call")
        if self.asked.leaves_s is not None:
            loop.call_later(self.asked.leaves_s, self.leave)
        if self.asked.timeout_s is not None:  # the server's own timer comes about when the engine's does
            loop.call_later(self.asked.timeout_s + self.asked.number % 3 * 0.01, self.leave)
        await asyncio.wait([serving])
        self.ended_s = loop.time()
        self.saw_no_core |= self.world.engine.core is None
        self.world.log(f"{self.name} ends: {self.code and self.code.name} {self.details}")
        self.world.oracles.call_ended(self)

    async def _serve(self) -> None:
        CALLER.set(Identity(self.name, f"tenant {self.asked.number % 3}", frozenset({Role.GENERATE})))
        try:
            await self.world.server.Generate(self.asked.message, self)  # type: ignore[arg-type]
            self.end(grpc.StatusCode.OK, "")
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self.end(grpc.StatusCode.CANCELLED, "the call was cancelled")
        except Exception as error:  # noqa: BLE001  # gRPC would answer with UNKNOWN
            self.end(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}")

    def leave(self) -> None:
        """The client cancels its call."""
        if self.serving is not None and not self.serving.done():
            self.has_left = True
            self.serving.cancel()

    def end(self, code: grpc.StatusCode, details: str) -> None:
        if self.code is not None:
            self.world.oracles.violated(f"{self.name} ends twice: {self.code.name}, then {code.name}")
        self.code, self.details = code, details

    def _receive(self, message: pb.GenerateResponse) -> None:
        kind = message.WhichOneof("event")
        self.world.log(f"{self.name} receives {kind}")
        problem = self.world.oracles.violated
        if kind == "started":
            self.num_started += 1
        elif not self.num_started:
            problem(f"{self.name} receives {kind} before Started")
        if kind == "delta":
            index = message.delta.index
            if index in self.reasons:
                problem(f"{self.name} receives tokens after the end of sequence {index}")
            self.token_ids.setdefault(index, []).extend(message.delta.token_ids)
            self.texts[index] = self.texts.get(index, "") + message.delta.text
        elif kind == "finished":
            if message.finished.index in self.reasons:
                problem(f"{self.name}: sequence {message.finished.index} ends twice")
            self.reasons[message.finished.index] = message.finished.reason
            self.world.oracles.usage(self, message.finished)

    # --- the part of grpc.aio.ServicerContext that the servicer uses --------------------------------------------

    def peer(self) -> str:
        return self.name

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    def time_remaining(self) -> float | None:
        if self.asked.timeout_s is None:
            return None
        return max(0.0, self.began_s + self.asked.timeout_s - asyncio.get_running_loop().time())

    async def write(self, message: pb.GenerateResponse) -> None:
        self.world.faults.may_raise("client: write", lambda: self.name)
        read_s = self.world.random.expovariate(1 / self.asked.read_s) if self.asked.read_s else 0.0
        if self.num_messages == self.asked.stalls_at:
            read_s = self.asked.stall_s
        self.num_messages += 1
        self.longest_stall_s = max(read_s, self.longest_stall_s)
        await asyncio.sleep(read_s)
        self._receive(pb.GenerateResponse.FromString(message.SerializeToString()))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> None:
        self.end(code, details)
        raise grpc.aio.AbortError(details)
