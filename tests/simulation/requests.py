"""The requests of simulated clients, drawn from the seed, and the output that each must get."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from quire.events import FinishReason as Reason
from quire.messages import generate_request
from scheduler.core import BeamParams, FinishReason, Request, SequenceParams
from scheduler.requests.seeds import sample_seed
from scheduler.text.chat_worker import compile_template
from scheduler.text.client_text import ClientText, TemplateInput
from scheduler.text.tokenizer import Tokenizer
from tests.simulation.model import expected_output
from tests.simulation.translation import seed_under
from tests.support.core.fake_executor import context_of, expected_beams, token_logprobs
from tests.support.scheduler import small_tokenizers

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from quire.v1 import generation_pb2 as pb
    from tests.simulation.world import World

FIRST_OWN_TOKEN = 100
"""A prompt of ids ends with this token plus the client's number, so that a fault can find the client's slots."""
HEAD = [1, 2, 3, 5, 8, 13, 21, 34]
"""Prompts of ids share the beginning of this."""
# None of these ends with a token that is a client's own.
TEXTS = ("the fox said: ", "Once upon a time 世界", "the fox said: hello", "naïve 😀")
CHATS = (("Hello",), ("the fox", "nothing", "and the river?"), ("<|user|> 世界",))
REASONS = {FinishReason.EOS: Reason.EOS, FinishReason.LENGTH: Reason.LENGTH, FinishReason.STOP: Reason.STOP}
Entry = tuple[int, float, int]
"""A token, its log-probability and its rank."""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(small_tokenizers.byte_level(), {"bos_token": "<s>", "eos_token": "</s>"})


@cache
def eos_token_id() -> int:
    return small_tokenizers.id_of(small_tokenizers.byte_level(), "</s>")


@cache
def renderer() -> Callable[[list[dict[str, str]]], str]:
    """Returns the function that the process of a chat renderer runs."""
    template, tokens = small_tokenizers.CHAT_TEMPLATE, tokenizer().control_tokens
    text = ClientText([{name: getattr(each, name) for name in each.__slots__} for each in tokens], template)
    render = compile_template(template, tokenizer().special_tokens)

    def rendered(messages: list[dict[str, str]]) -> str:
        hidden, replaced = text.hide(TemplateInput(messages, [], {}))
        return text.restore(render(hidden, 10_000), replaced)

    return rendered


@dataclass(frozen=True, slots=True)
class Output:
    """The output of one sequence. `logprobs` has an entry for each token if the request asks for them."""

    token_ids: list[int]
    text: str
    reason: Reason
    logprobs: list[list[Entry]] = field(default_factory=list)
    score: float | None = None


@dataclass(frozen=True)
class Asked:
    """A request and what its client does. Times are in seconds of the loop's clock.

    prompt             the prompt's token ids, whatever the request has as its prompt
    read_s             mean time that the client takes for a message
    stalls_at          number of the message that the client does not read for `stall_s`; -1: none
    breaks_at          numbers of the messages after which the connection breaks
    leaves_s           when the client cancels, after its arrival
    timeout_s          the client's deadline, after its arrival
    resume_timeout_s   how long the client tries to continue a stream that broke off; 0: it does not
    knows_server       the client has talked to the server before
    waits              the client waits for a server that is not there yet
    """

    number: int
    message: pb.GenerateRequest
    prompt: list[int]
    arrives_s: float
    read_s: float
    stalls_at: int
    stall_s: float
    breaks_at: tuple[int, ...]
    leaves_s: float | None
    timeout_s: float | None
    resume_timeout_s: float
    knows_server: bool
    waits: bool
    _outputs: dict[tuple[str, int], Output] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.message.request_id

    @property
    def num_sequences(self) -> int:
        return self.message.sampling.n or 1

    @property
    def is_beam(self) -> bool:
        return self.message.sampling.beam_width > 0

    def most_blocks(self, block_size: int) -> int:
        """Returns the most blocks that one sequence, or a beam search, can hold."""
        num_tokens, num_shared = len(self.prompt) + self.message.stopping.max_tokens, len(self.prompt) // block_size
        if not self.is_beam:
            return -(-num_tokens // block_size)
        return num_shared + self.message.sampling.beam_width * (-(-num_tokens // block_size) - num_shared)

    @property
    def params(self) -> SequenceParams:
        stopping, sampling, num_prompt = self.message.stopping, self.message.sampling, len(self.prompt)
        return SequenceParams(
            max_total_tokens=num_prompt + stopping.max_tokens,
            min_total_tokens=num_prompt + stopping.min_tokens if stopping.min_tokens else 0,
            eos_token_ids=() if stopping.ignore_eos else (eos_token_id(),),
            stop_token_ids=tuple(stopping.stop_token_ids),
            repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
        )

    def tokens(self, index: int, digest: str, vocab_size: int) -> tuple[list[int], FinishReason]:
        """Returns what a sequence samples before any stop string is looked for."""
        seed = seed_under(digest, sample_seed(self.message.sampling.seed, index))
        return expected_output(self.prompt, self.params, seed, vocab_size)

    def texts(self, digest: str, vocab_size: int) -> list[list[int]]:
        """Returns prompt and output of each sequence without stop strings; of a beam search only the prompt."""
        if self.is_beam:
            return [self.prompt]
        indices = range(self.num_sequences)
        return [[*self.prompt, *self.tokens(index, digest, vocab_size)[0]] for index in indices]

    def expected(self, index: int, digest: str, vocab_size: int) -> Output:
        """Returns the undisturbed output of a sequence from the weights with this digest."""
        if (digest, index) not in self._outputs:
            self._outputs[digest, index] = self._expected(index, digest, vocab_size)
        return self._outputs[digest, index]

    def _expected(self, index: int, digest: str, vocab_size: int) -> Output:
        if self.is_beam:
            return self._expected_beam(index, vocab_size)
        token_ids, reason = self.tokens(index, digest, vocab_size)
        output = self._cut(token_ids, reason, tuple(self.message.stopping.stop))
        if self.message.output.HasField("logprobs"):
            width = self.message.output.logprobs + 1
            context = context_of([*self.prompt, *output.token_ids])
            for place, token_id in enumerate(output.token_ids, len(self.prompt)):
                output.logprobs.append(token_logprobs(context[:place], token_id, width, vocab_size))
        return output

    def _expected_beam(self, index: int, vocab_size: int) -> Output:
        sampling = self.message.sampling
        penalty = sampling.length_penalty if sampling.HasField("length_penalty") else 1.0
        beam = BeamParams(sampling.beam_width, self.num_sequences, penalty, sampling.early_stopping)
        for place, result in enumerate(expected_beams(Request(0, self.prompt, self.params, beam=beam), vocab_size)):
            whole = self._cut(result.token_ids, result.reason, ())
            self._outputs["0", place] = Output(whole.token_ids, whole.text, whole.reason, score=result.score)
        return self._outputs["0", index]

    def expected_prompt_logprobs(self, vocab_size: int) -> list[list[Entry]]:
        if not self.message.output.HasField("prompt_logprobs"):
            return []
        width, context = self.message.output.prompt_logprobs + 1, context_of(self.prompt)
        return [
            token_logprobs(context[:place], self.prompt[place], width, vocab_size)
            for place in range(1, len(self.prompt))
        ]

    def _cut(self, token_ids: list[int], reason: FinishReason, stops: tuple[str, ...]) -> Output:
        """Returns the output up to the first stop string, if there is one."""
        detokenizer = tokenizer().detokenizer(continues_text=not self.message.HasField("chat"))
        endings, text, start = {*self.params.eos_token_ids, *self.params.stop_token_ids}, "", 0
        for number, token_id in enumerate(token_ids, 1):
            is_last = number == len(token_ids)
            text += detokenizer.decode([] if is_last and token_id in endings else [token_id])
            if is_last:
                text += detokenizer.flush()
            if number < self.message.stopping.min_tokens:
                start = len(text)
            elif places := [text.index(stop, start) for stop in stops if stop in text[start:]]:
                return Output(token_ids[:number], text[: min(places)], Reason.STOP)
        return Output(token_ids, text, REASONS[reason])


def tenant_of(number: int) -> str:
    return f"tenant {number % 3}"


def draw(random: Random, number: int, world: World) -> Asked:
    """Draws a request whose prompt often shares its head with others."""
    prompt, given = _draw_prompt(random, number, world)
    most = max(1, world.max_tokens_per_sequence - len(prompt) - 1)
    vocab_size, kind = world.machine.vocab_size, random.random()
    options: dict[str, Any] = {
        "n": min(random.choice((1, 1, 1, 2, 3)), world.machine.max_num_seqs),
        "max_tokens": min(most, random.choice((1, 4, 12, 25))),
        "ignore_eos": random.random() < 0.5,
        "stop_token_ids": [random.randrange(vocab_size)] if random.random() < 0.2 else [],
    }
    if kind < 0.08:
        width = min(random.choice((2, 3)), world.machine.max_num_seqs)
        room = (world.num_blocks - 1 - len(prompt)) * world.machine.block_size // width
        most = max(1, min(options["max_tokens"], 8, room - len(prompt) % world.machine.block_size))
        options |= {"beam_width": width, "n": min(options["n"], width), "max_tokens": most}
        options |= {"length_penalty": random.choice((0.0, 1.0, 2.0)), "early_stopping": random.random() < 0.5}
    else:
        options |= {"seed": random.getrandbits(20), "temperature": 1.0}
        if kind < 0.2:
            options |= {"logprobs": random.choice((0, 2)), "prompt_logprobs": random.choice((None, None, 1))}
        if kind > 0.75:
            options |= {"frequency_penalty": random.choice((0.5, -0.5)), "repetition_penalty": 1.5}
        if random.random() < 0.1:
            options["min_tokens"] = random.randint(1, options["max_tokens"])
    message = generate_request(given, options)
    message.request_id = f"client {number}"
    is_slow, leaves, hurries = random.random() < 0.15, random.random() < 0.2, random.random() < 0.15
    asked = Asked(
        number,
        message,
        prompt,
        arrives_s=random.uniform(0, 1.0),
        read_s=random.choice((0.0, 0.0, 0.001, 0.05)),
        stalls_at=random.randrange(8) if is_slow else -1,
        stall_s=random.choice((0.1, 1.5, 30.0)),
        breaks_at=tuple(random.randrange(8) for _ in range(random.choice((0, 0, 0, 1, 2)))),
        leaves_s=random.choice((random.uniform(0, 0.01), random.uniform(0, 1))) if leaves else None,
        timeout_s=random.choice((random.uniform(0, 0.05), random.uniform(0, 3))) if hurries else None,
        resume_timeout_s=random.choice((0.0, 60.0, 60.0, 60.0)),
        knows_server=random.random() < 0.7,
        waits=random.random() < 0.3,
    )
    if not asked.is_beam and random.random() < 0.4:
        _add_stop(random, asked, world)
    return asked


def _draw_prompt(random: Random, number: int, world: World) -> tuple[list[int], Any]:
    """Returns the prompt's token ids, and the prompt as ids, text or a chat."""
    given: Any
    prompt: list[int]
    kind, given, prompt = random.random(), None, []
    if kind < 0.12:
        given = random.choice(TEXTS)
        prompt = tokenizer()._tokenizer.encode(given).ids
    elif kind < 0.24:
        texts = random.choice(CHATS)
        given = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        prompt = tokenizer()._encode_chat(tokenizer()._chat.tokenizer, renderer()(given), None)
    is_special = number in (world.faults.poison, *world.faults.spoilt)
    if prompt and not is_special and len(prompt) + 2 <= world.max_tokens_per_sequence:
        return prompt, given
    head = HEAD[: random.choice((0, 4, 8))]
    tail = [random.randrange(50, 60) for _ in range(random.randint(0, 6))]
    prompt = [*head, *tail, FIRST_OWN_TOKEN + number]
    return prompt, prompt


def _add_stop(random: Random, asked: Asked, world: World) -> None:
    """Adds a stop string that the output of some sequence contains."""
    index = random.randrange(asked.num_sequences)
    text = asked._cut(*asked.tokens(index, "0", world.machine.vocab_size), ()).text
    place = random.randrange(len(text)) if text else 0
    if stop := text[place : place + random.randint(1, 3)]:
        asked.message.stopping.stop.append(stop)
