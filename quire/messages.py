"""Converts between Python values and protobuf messages, for both clients. All functions are pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from enum import StrEnum
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

from quire.block_map import (
    Block,
    BlockMap,
    BlockState,
    PoolSummary,
    RunningSequence,
    ServerInfo,
    ServerState,
    StepTrace,
)
from quire.errors import InternalError, InvalidRequestError
from quire.events import (
    ChatMessage,
    CompletedSequence,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Prompt,
    PromptLogprobs,
    Started,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from quire.message_fields import GRAMMAR_HOLDER, GRAMMARS, set_field, set_grammar
from quire.options import GenerateOptions
from quire.v1 import admin_pb2, generation_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def _option_holders() -> dict[str, str]:
    """Maps each option to the field of GenerateRequest that holds it; to "" if it is a field of the request itself."""
    holders = {
        **dict.fromkeys(generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name, ""),
        **dict.fromkeys(generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name, "sampling"),
        **dict.fromkeys(generation_pb2.StoppingParams.DESCRIPTOR.fields_by_name, "stopping"),
        **dict.fromkeys(generation_pb2.OutputParams.DESCRIPTOR.fields_by_name, "output"),
        **dict.fromkeys(GRAMMARS, GRAMMAR_HOLDER),
    }
    return {name: holders[name] for name in GenerateOptions.__annotations__}


_OPTION_HOLDERS = _option_holders()


def generate_request(prompt: Prompt, options: Mapping[str, Any]) -> generation_pb2.GenerateRequest:
    """Returns the request message.

    Raises TypeError for an unknown option and for a prompt that is none of the three kinds. Raises InvalidRequestError,
    as the server would, for values that the fields of the message cannot hold.
    """
    request = generation_pb2.GenerateRequest()
    violations: dict[str, str] = {}
    _set_prompt(request, prompt, violations)
    for name, value in options.items():
        if name not in _OPTION_HOLDERS:
            raise TypeError(_unknown_option(name))
        if value is None:
            continue
        if name == "stop" and isinstance(value, str):
            value = [value]
        if name in GRAMMARS:
            set_grammar(request.structured_output, name, value, violations)
            continue
        holder = _OPTION_HOLDERS[name]
        target = getattr(request, holder) if holder else request
        set_field(target, name, value, f"{holder}.{name}" if holder else name, violations)
    if violations:
        raise InvalidRequestError("the request cannot be sent", violations)
    return request


def _unknown_option(name: str) -> str:
    similar = "".join(f"; did you mean {each!r}?" for each in get_close_matches(name, _OPTION_HOLDERS, n=1))
    return f"generate() has no option {name!r}{similar}"


def _set_prompt(request: generation_pb2.GenerateRequest, prompt: Prompt, violations: dict[str, str]) -> None:
    if isinstance(prompt, str):
        set_field(request, "text", prompt, "text", violations)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise TypeError(f"a prompt is text, token ids or chat messages, not {type(prompt).__name__}")
    elif prompt and isinstance(prompt[0], ChatMessage | Mapping):
        request.chat.SetInParent()
        for position, message in enumerate(prompt):
            _add_message(request.chat, message, f"chat.messages[{position}]", violations)
    else:
        request.token_ids.SetInParent()
        set_field(request.token_ids, "ids", prompt, "token_ids", violations)


def _add_message(chat: generation_pb2.ChatPrompt, message: object, path: str, violations: dict[str, str]) -> None:
    if isinstance(message, ChatMessage):
        parts = {"role": message.role, "content": message.content}
    elif isinstance(message, Mapping) and set(message) == {"role", "content"}:
        parts = dict(message)
    else:
        raise TypeError(f"{path} is neither a ChatMessage nor a dict of role and content")
    added = chat.messages.add()
    for name, value in parts.items():
        set_field(added, name, value, f"{path}.{name}", violations)


def event(message: generation_pb2.GenerateResponse) -> Event | None:
    """Returns the event in a response, or None for a kind that only a newer client knows."""
    match message.WhichOneof("event"):
        case "started":
            started = message.started
            return Started(started.request_id, started.prompt_tokens, started.cached_tokens)
        case "delta":
            delta = message.delta
            logprobs = tuple(map(_logprobs, delta.logprobs))
            return Delta(delta.index, delta.text, tuple(delta.token_ids), logprobs)
        case "finished":
            return _finished(message.finished)
        case "prompt_logprobs":
            prompt = message.prompt_logprobs
            return PromptLogprobs(prompt.first_position, tuple(map(_logprobs, prompt.tokens)))
    return None


def _logprobs(message: generation_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(_logprob(message.chosen), tuple(map(_logprob, message.top)))


def _logprob(message: generation_pb2.TokenLogprob) -> TokenLogprob:
    token_bytes = message.bytes if message.HasField("bytes") else None
    return TokenLogprob(message.token_id, message.logprob, message.rank, token_bytes)


def _finished(message: generation_pb2.Finished) -> Finished:
    usage = message.usage
    return Finished(
        message.index,
        _known(_FINISH_REASONS, message.reason, "finish reason"),
        Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.num_preemptions),
        message.score if message.HasField("score") else None,
    )


_E = TypeVar("_E", bound=StrEnum)
_D = TypeVar("_D", bound="DataclassInstance")


def _by_number(enum: Any, values: type[_E], prefix: str) -> dict[int, _E]:
    """Maps the numbers of an enum to its values: `FINISH_REASON_EOS` to FinishReason("eos"). Leaves out UNSPECIFIED."""
    return {number: values(name.removeprefix(prefix).lower()) for name, number in enum.items() if number}


def _known(table: dict[int, _E], number: int, name: str) -> _E:
    """Looks up an enum value. Raises InternalError for UNSPECIFIED and for numbers that this client does not know."""
    if number not in table:
        raise InternalError(f"the server sent {name} {number}, which has no meaning here")
    return table[number]


_FINISH_REASONS = _by_number(generation_pb2.FinishReason, FinishReason, "FINISH_REASON_")
_SERVER_STATES = _by_number(generation_pb2.ServerState, ServerState, "SERVER_STATE_")
_BLOCK_STATES = _by_number(admin_pb2.BlockState, BlockState, "BLOCK_STATE_")


class CompletionAssembler:
    """Assembles a Completion from the events of one request."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._text: dict[int, list[str]] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[TokenLogprobs]] = {}
        self._finished: dict[int, Finished] = {}

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
            case PromptLogprobs():
                self._prompt_logprobs.extend(event.tokens)
            case Delta(index=index):
                self._text.setdefault(index, []).append(event.text)
                self._token_ids.setdefault(index, []).extend(event.token_ids)
                self._logprobs.setdefault(index, []).extend(event.logprobs)
            case Finished(index=index):
                self._finished[index] = event

    def completion(self) -> Completion:
        """Returns the Completion. Raises InternalError if the stream ended before all of its sequences did."""
        indices = sorted(self._text.keys() | self._finished.keys())
        if self._started is None or not indices or len(self._finished) != len(indices):
            raise InternalError("the stream ended before the completion did")
        return Completion(
            request_id=self._started.request_id,
            prompt_tokens=self._started.prompt_tokens,
            cached_tokens=self._started.cached_tokens,
            sequences=tuple(self._sequence(index) for index in indices),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )

    def _sequence(self, index: int) -> CompletedSequence:
        finished = self._finished[index]
        return CompletedSequence(
            index=index,
            text="".join(self._text.get(index, ())),
            token_ids=tuple(self._token_ids.get(index, ())),
            reason=finished.reason,
            usage=finished.usage,
            logprobs=tuple(self._logprobs.get(index, ())),
            score=finished.score,
        )


def server_info(message: generation_pb2.GetServerInfoResponse) -> ServerInfo:
    return _copied(ServerInfo, message, state=_known(_SERVER_STATES, message.state, "server state"))


def block_map(message: admin_pb2.GetBlockMapResponse) -> BlockMap:
    return _copied(
        BlockMap,
        message,
        summary=pool_summary(message),
        blocks=tuple(chain.from_iterable(map(_expanded, message.blocks))),
        sequences=tuple(
            _copied(RunningSequence, sequence, block_table=tuple(sequence.block_table))
            for sequence in message.sequences
        ),
    )


def _expanded(run: admin_pb2.BlockInfo) -> Iterator[Block]:
    return repeat(Block(_known(_BLOCK_STATES, run.state, "block state"), run.ref_count, run.num_hits), run.length or 1)


def pool_summary(message: admin_pb2.GetBlockMapResponse) -> PoolSummary:
    summary = message.summary
    return PoolSummary(
        num_free_blocks=summary.num_free_blocks,
        num_cached_blocks=summary.num_cached_blocks,
        num_active_blocks=summary.num_active_blocks,
        num_shared_blocks=summary.num_shared_blocks,
        num_used_token_slots=summary.num_used_slots,
        num_wasted_token_slots=summary.num_wasted_slots,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_preemptions=message.num_preemptions,
        num_cow_copies=message.num_cow_copies,
    )


def step_trace(message: admin_pb2.GetStepTraceResponse) -> tuple[StepTrace, ...]:
    return tuple(_copied(StepTrace, step) for step in message.steps)


def _copied(kind: type[_D], message: Any, **converted: Any) -> _D:
    """Returns a dataclass with the values of the message's fields of the same names, except those that are given."""
    names = [field.name for field in fields(kind) if field.name not in converted]
    return kind(**{name: getattr(message, name) for name in names}, **converted)
