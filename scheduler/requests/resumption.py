"""Reads and checks what a client sends to continue a stream that broke off (`quire.v1.Resumption`)."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from quire.v1 import generation_pb2 as pb
from scheduler.core import ReceivedOutput
from scheduler.requests.sampling_params import SAMPLING_PARAMS
from scheduler.requests.status import OtherModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scheduler.core import Request, SequenceParams
    from scheduler.engine.engine import Engine
    from scheduler.engine.model_description import ModelDescription
    from scheduler.requests.limits import ModelBounds
    from scheduler.requests.request_fields import RequestFields

CONTINUATION = "resume.continuation"
SEQUENCES = "resume.sequences"


@dataclass(frozen=True, slots=True)
class Resumption:
    """A continuation whose model is the served one, as its client has sent it."""

    seed: int
    prompt_token_ids: list[int]
    num_cached_tokens: int
    settings_digest: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """The bounds of the length of a sequence. `max_tokens` is None if the client set none."""

    min_tokens: int
    max_tokens: int | None
    ending_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class ReceivedSequence(ReceivedOutput):
    """The output that a client has received of a sequence. `has_last`: it has all text too, so no Delta may follow."""

    has_last: bool = False


def model_digest(model: ModelDescription) -> str:
    """Returns a name for the model and its weights; empty if the executor has no digest of its weights."""
    if not model.weights_digest:
        return ""
    return sha256("\0".join((model.model_name, model.dtype, model.weights_digest)).encode()).hexdigest()


def settings_digest(params: SequenceParams, num_results: int) -> str:
    """Returns a name for the parameters that have defaults of the operator or of the checkpoint."""
    sampling = [getattr(params, param.name) for param in SAMPLING_PARAMS if param.in_checkpoint]
    return sha256(repr((sampling, params.eos_token_ids, num_results)).encode()).hexdigest()


def continuation_of(engine: Engine, request: Request, num_cached_tokens: int) -> pb.Continuation:
    """Returns what another server needs to continue the stream of a request that has started."""
    return pb.Continuation(
        seed=request.seeds[0],
        prompt=pb.TokenIds(ids=request.prompt_token_ids),
        cached_tokens=num_cached_tokens,
        model_digest=model_digest(engine.description),
        settings_digest=settings_digest(request.params, request.num_results),
    )


def num_resumed_ids(fields: RequestFields) -> int:
    """Returns the number of token ids that a resumption contains, unchecked."""
    continuation, sequences = fields.get(CONTINUATION), fields.get(SEQUENCES)
    num_prompt = len(continuation.prompt.ids) if isinstance(continuation, pb.Continuation) else 0
    return num_prompt + sum(len(each.token_ids) for each in sequences or () if isinstance(each, pb.ResumedSequence))


def read_resumption(fields: RequestFields, bounds: ModelBounds) -> Resumption | None:
    """Returns the continuation; None if the request resumes nothing, or after a violation.

    Raises OtherModel if the stream began with another model: then no other check would mean anything.
    """
    if SEQUENCES not in fields:
        return None
    continuation = fields.get(CONTINUATION)
    if not isinstance(continuation, pb.Continuation):
        fields.add_violation(CONTINUATION, "must be the Started.continuation of the stream")
        return None
    check_model(continuation, bounds)
    prompt = _check_prompt(fields, continuation.prompt.ids, bounds)
    if prompt and continuation.cached_tokens >= len(prompt):
        problem = f"must be less than the {len(prompt)} prompt tokens, not {continuation.cached_tokens}"
        fields.add_violation(f"{CONTINUATION}.cached_tokens", problem)
    if fields.get("sampling.seed") not in (None, continuation.seed):
        fields.add_violation(f"{CONTINUATION}.seed", f"must be sampling.seed, not {continuation.seed}")
    return Resumption(continuation.seed, prompt, continuation.cached_tokens, continuation.settings_digest)


def check_model(continuation: pb.Continuation, bounds: ModelBounds) -> None:
    """Raises OtherModel. Called again before the request is queued: another executor may have come meanwhile."""
    if continuation.model_digest != bounds.model_digest:
        raise OtherModel("the server has another model or other weights than the one that began the stream")


def _check_prompt(fields: RequestFields, token_ids: Sequence[int], bounds: ModelBounds) -> list[int]:
    path = f"{CONTINUATION}.prompt.ids"
    if not token_ids:
        fields.add_violation(path, "must not be empty")
    if len(token_ids) >= bounds.max_tokens_per_sequence:
        return list(token_ids)  # refused for its length, so the ids need no checks
    if "token_ids.ids" in fields and list(token_ids) != list(fields.items("token_ids.ids")):
        fields.add_violation(path, "must be token_ids, which the request has as its prompt")
        return []
    return fields.check_token_ids(path, token_ids, bounds.vocab_size)


def check_received(
    fields: RequestFields,
    bounds: ModelBounds,
    resumption: Resumption,
    num_results: int,
    lengths: Lengths,
    params: SequenceParams,
) -> tuple[ReceivedSequence, ...]:
    """Returns what was received of each of `num_results` sequences.

    A finished one has no tokens here, because nothing depends on them. Raises OtherModel if the stream began with
    other parameters: the server may have other defaults than the one that began it.
    """
    if resumption.settings_digest not in ("", settings_digest(params, num_results)):
        raise OtherModel("the stream began with other parameters, or the server has other defaults for absent ones")
    num_prompt_tokens = len(resumption.prompt_token_ids)
    most = max(0, bounds.max_model_len - num_prompt_tokens) if lengths.max_tokens is None else lengths.max_tokens
    outputs = [ReceivedSequence()] * num_results
    entries = fields.items(SEQUENCES, num_results)
    seen: set[int] = set()
    for i, entry in enumerate(entries):
        path = f"{SEQUENCES}[{i}]"
        if entry.index >= num_results:
            problem = f"must be from 0 to {num_results - 1}, not {entry.index}"
            fields.add_violation(f"{path}.index", problem)
        elif entry.index in seen:
            fields.add_violation(f"{path}.index", f"must not be {entry.index} again")
        else:
            seen.add(entry.index)
            token_ids: list[int] = []
            if not entry.finished and len(entry.token_ids) > most:
                fields.add_violation(f"{path}.token_ids", f"must be at most {most}, not {len(entry.token_ids)}")
            elif not entry.finished:
                token_ids = fields.check_token_ids(f"{path}.token_ids", entry.token_ids, bounds.vocab_size)
                _check_endings(fields, f"{path}.token_ids", token_ids, lengths)
            outputs[entry.index] = ReceivedSequence(token_ids, entry.finished, entry.has_last)
    has_output = any(output.token_ids or output.is_finished for output in outputs)
    if num_prompt_tokens:  # otherwise the prompt is a violation
        num_reports = num_prompt_tokens - 1 if params.num_prompt_logprobs else 0
        _check_num_prompt_logprobs(fields, num_reports, has_output=has_output)
    return tuple(outputs)


def _check_endings(fields: RequestFields, path: str, token_ids: list[int], lengths: Lengths) -> None:
    """Adds a violation for a token that ends a sequence, if it is not the last or comes before min_tokens."""
    if lengths.ending_token_ids.isdisjoint(token_ids):
        return
    place = next(place for place, token_id in enumerate(token_ids) if token_id in lengths.ending_token_ids)
    if place + 1 < len(token_ids):
        fields.add_violation(f"{path}[{place}]", "ends the sequence, so no token can follow it")
    elif place + 1 < lengths.min_tokens:
        fields.add_violation(f"{path}[{place}]", f"cannot end the sequence before it has {lengths.min_tokens} tokens")


def _check_num_prompt_logprobs(fields: RequestFields, num_reports: int, *, has_output: bool) -> None:
    """Checks that no more entries were received than there are; all of them are sent before any output."""
    path, number = "resume.num_prompt_logprobs", fields.get("resume.num_prompt_logprobs") or 0
    if number > num_reports:
        fields.add_violation(path, f"must be at most {num_reports}, not {number}")
    elif has_output and number < num_reports:
        fields.add_violation(path, f"must be {num_reports}, because output was received, not {number}")
