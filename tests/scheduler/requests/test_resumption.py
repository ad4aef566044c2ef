"""Resumed requests are checked, limited and counted like any other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from quire.v1 import generation_pb2 as pb
from scheduler.core import CapacityExceeded, InvalidRequest, QueueFull, Unavailable
from scheduler.requests import replay as replays
from scheduler.requests.resumption import model_digest
from scheduler.requests.status import OtherModel, RequestFailed, status_of
from scheduler.tenants.settings import Tenants, TenantSettings
from scheduler.text.checkpoint import Checkpoint
from tests.support.scheduler.broken_streams import MODEL, Messages, Models, content, resumption

WHOLE = pb.GenerateRequest(
    resumable=True,
    request_id="a",
    token_ids=pb.TokenIds(ids=[5, 6, 7]),
    sampling={"seed": 4, "n": 2},
    stopping={"max_tokens": 8, "min_tokens": 3, "stop_token_ids": [300], "ignore_eos": True},
    output={"prompt_logprobs": 0},
)


@pytest.fixture
async def models(checkpoint: Checkpoint) -> AsyncIterator[Models]:
    models = Models(checkpoint, (1,))
    yield models
    await models.close()


@pytest.fixture
async def received(models: Models) -> Messages:
    async with models.open_scheduler() as scheduler:
        return await scheduler.messages(WHOLE, most=6)


async def refusal(models: Models, asked: pb.GenerateRequest, **options: Any) -> Exception:
    async with models.open_scheduler(**options) as scheduler:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            await scheduler.messages(asked)
        assert not scheduler.engine.core or not scheduler.engine.core.num_unfinished_requests
        assert scheduler.metrics.measurements.num_resumed == 0
    return caught.value


def change(path: str, value: Any) -> Callable[[pb.GenerateRequest], None]:
    """Returns a function that sets a field of `resume`, or all items of a repeated one."""

    def apply(asked: pb.GenerateRequest) -> None:
        *parents, name = path.split(".")
        message: Any = asked.resume
        for parent in parents:
            message = message[int(parent)] if parent.isdigit() else getattr(message, parent)
        if isinstance(value, list):
            del getattr(message, name)[:]
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)

    return apply


@pytest.mark.parametrize(
    ("apply", "path", "problem"),
    [
        (lambda asked: asked.resume.ClearField("continuation"), "resume.continuation", "must be the Started"),
        (change("continuation.prompt.ids", []), "resume.continuation.prompt.ids", "must not be empty"),
        (change("continuation.prompt.ids", [5, 6, 8]), "resume.continuation.prompt.ids", "must be token_ids"),
        (change("continuation.prompt.ids", [5, 6, 382]), "resume.continuation.prompt.ids", "must be token_ids"),
        (change("continuation.seed", 5), "resume.continuation.seed", "must be sampling.seed, not 5"),
        (change("continuation.cached_tokens", 3), "resume.continuation.cached_tokens", "must be less than the 3"),
        (change("sequences.0.index", 2), "resume.sequences[0].index", "must be from 0 to 1, not 2"),
        (change("sequences.0.index", 1), "resume.sequences[1].index", "must not be 1 again"),
        (change("sequences", [pb.ResumedSequence()] * 3), "resume.sequences", "must be at most 2, not 3"),
        (change("sequences.0.token_ids", [382]), "resume.sequences[0].token_ids[0]", "must be a token id"),
        (change("sequences.0.token_ids", [9] * 9), "resume.sequences[0].token_ids", "must be at most 8, not 9"),
        (change("sequences.0.token_ids", [9, 9, 9, 300, 9]), "resume.sequences[0].token_ids[3]", "no token can follow"),
        (change("sequences.0.token_ids", [9, 300]), "resume.sequences[0].token_ids[1]", "cannot end the sequence"),
        (change("num_prompt_logprobs", 3), "resume.num_prompt_logprobs", "must be at most 2, not 3"),
        (change("num_prompt_logprobs", 1), "resume.num_prompt_logprobs", "must be 2, because output"),
    ],
)
async def test_resumptions_that_contradict_the_request_are_invalid(
    models: Models, received: Messages, apply: Callable[[pb.GenerateRequest], None], path: str, problem: str
) -> None:
    asked = resumption(WHOLE, received)
    assert len(asked.resume.sequences) == 2
    apply(asked)
    error = await refusal(models, asked)
    assert isinstance(error, InvalidRequest)
    assert list(error.violations) == [path]
    assert problem in error.violations[path]


async def test_a_prompt_beyond_the_vocabulary_is_invalid(models: Models, received: Messages) -> None:
    asked = resumption(WHOLE, received)
    asked.text = "hello"
    change("continuation.prompt.ids", [5, 382, 7])(asked)
    error = await refusal(models, asked)
    assert isinstance(error, InvalidRequest)
    assert list(error.violations) == ["resume.continuation.prompt.ids[1]"]


async def test_a_wrong_parameter_is_invalid_and_not_that_of_another_server(models: Models, received: Messages) -> None:
    asked = resumption(WHOLE, received)
    asked.sampling.n = 1000
    error = await refusal(models, asked)
    assert isinstance(error, InvalidRequest)
    assert list(error.violations) == ["sampling.n"]


async def test_tokens_after_a_stop_string_are_invalid(models: Models, received: Messages) -> None:
    asked = resumption(WHOLE, received)
    change("sequences.0.token_ids", [9, 40, 41, 42, 43])(asked)
    asked.stopping.stop.append(models.tokenizer.detokenizer().decode([41]))
    error = await refusal(models, asked)
    assert isinstance(error, InvalidRequest)
    assert error.violations == {"resume.sequences": "sequence 0 has 5 tokens, and a stop string ends it after 3"}


async def test_a_prompt_that_never_fits_is_refused_for_its_length(models: Models, received: Messages) -> None:
    asked = resumption(WHOLE, received)
    asked.text = "hello"
    change("continuation.prompt.ids", [500] * 1000)(asked)
    change("num_prompt_logprobs", 999)(asked)
    assert isinstance(await refusal(models, asked), CapacityExceeded)


@pytest.mark.parametrize("weights", ["other", ""])
async def test_other_weights_do_not_continue_a_stream(models: Models, received: Messages, weights: str) -> None:
    asked = resumption(WHOLE, received)
    change("sequences.0.token_ids", [382])(asked)  # with another model no other check would mean anything
    error = await refusal(models, asked, description=replace(MODEL, weights_digest=weights))
    assert isinstance(error, OtherModel)
    assert status_of(error).code.name == "FAILED_PRECONDITION"
    assert "other weights" in status_of(error).message


async def test_weights_without_a_digest_continue_only_each_other(models: Models) -> None:
    unknown = replace(MODEL, weights_digest="")
    async with models.open_scheduler(unknown) as scheduler:
        messages = await scheduler.messages(WHOLE)
    assert messages[0].started.continuation.model_digest == ""
    asked = resumption(WHOLE, messages[:6])
    async with models.open_scheduler(unknown) as scheduler:
        assert content([*messages[:6], *await scheduler.messages(asked)]) == content(messages)
    assert isinstance(await refusal(models, asked), OtherModel)


async def test_the_digest_names_model_type_and_weights(models: Models) -> None:
    async with models.open_scheduler() as scheduler:
        model = scheduler.engine.description
    others = [replace(model, **{name: "other"}) for name in ("model_name", "dtype", "weights_digest")]
    assert len({model_digest(each) for each in (model, *others)}) == 4
    assert model_digest(replace(model, device="other", num_blocks=7)) == model_digest(model)


async def test_a_stream_of_which_everything_was_received_consists_of_started(models: Models) -> None:
    async with models.open_scheduler() as scheduler:
        messages = await scheduler.messages(WHOLE)
    asked = resumption(WHOLE, messages)
    async with models.open_scheduler() as scheduler:
        assert await scheduler.messages(asked) == messages[:1]
        assert scheduler.engine.core is not None
        assert scheduler.engine.core.state.counters.num_steps == 0
        assert sum(scheduler.metrics.measurements.num_finished.values()) == 1
        assert scheduler.metrics.measurements.num_resumed == 1
        for sequence in asked.resume.sequences:
            del sequence.token_ids[:]  # nothing depends on them
        assert await scheduler.messages(asked) == messages[:1]
        assert not scheduler.metrics._queued  # such a request is never queued, so no plan would remove it


async def test_a_request_without_resumable_gets_no_continuation(models: Models) -> None:
    plain = pb.GenerateRequest()
    plain.CopyFrom(WHOLE)
    plain.ClearField("resumable")
    async with models.open_scheduler() as scheduler:
        assert not (await scheduler.messages(plain))[0].started.HasField("continuation")


async def test_a_draining_server_refuses_resumptions(models: Models, received: Messages) -> None:
    async with models.open_scheduler() as scheduler:
        await scheduler.engine.drain()
        with pytest.raises(Unavailable, match="draining"):
            await scheduler.messages(resumption(WHOLE, received))


async def test_rate_limits_count_the_given_tokens(models: Models, received: Messages) -> None:
    asked = resumption(WHOLE, received)
    num_given = sum(3 + len(sequence.token_ids) for sequence in asked.resume.sequences)
    tenants = Tenants(TenantSettings(tokens_per_minute=num_given + 16))
    async with models.open_scheduler(tenants=tenants) as scheduler:
        await scheduler.messages(asked)
        bucket = scheduler.intake._rates._buckets["default", "tokens"]
        num_new = 2 * 8 - sum(len(sequence.token_ids) for sequence in asked.resume.sequences)
        assert round(bucket.capacity - bucket.balance) == num_given + num_new
        with pytest.raises(QueueFull, match="tokens a minute"):
            await scheduler.messages(asked)


async def test_streams_are_replayed_one_at_a_time(
    models: Models, received: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay takes the event loop from all other streams."""
    replay, num_at_once, most = replays.replay, 0, 0

    async def watched(*arguments: Any) -> Any:
        nonlocal num_at_once, most
        num_at_once += 1
        most = max(most, num_at_once)
        try:
            await asyncio.sleep(0.01)
            return await replay(*arguments)
        finally:
            num_at_once -= 1

    monkeypatch.setattr(replays, "replay", watched)
    async with models.open_scheduler() as scheduler:
        await asyncio.gather(*(scheduler.messages(resumption(WHOLE, received)) for _ in range(5)))
        assert scheduler.metrics.measurements.num_resumed == 5
    assert most == 1


async def test_a_stream_that_comes_back_is_not_refused_for_its_predicted_wait(
    models: Models, received: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps of a new process can be slow, and then all streams of the old one would be refused."""

    def too_late(*_: object) -> None:
        raise QueueFull("the request would miss its deadline", 600.0)

    async with models.open_scheduler() as scheduler:
        whole = await scheduler.messages(WHOLE)
        monkeypatch.setattr(scheduler.intake._engine._waits, "check", too_late)
        for beginning in (received, whole[:1]):
            rest = await scheduler.messages(resumption(WHOLE, beginning))
            assert sum(message.HasField("finished") for message in rest) == 2
        with pytest.raises(QueueFull, match="miss its deadline"):
            await scheduler.messages(WHOLE)


async def test_a_stream_that_broke_off_before_its_first_token_counts_its_prompt_once(models: Models) -> None:
    """Its samples are forked from one prompt, as those of a request that is not resumed."""
    async with models.open_scheduler() as scheduler:
        started = await scheduler.messages(WHOLE, most=1)
    asked = resumption(WHOLE, started)
    assert not any(sequence.token_ids for sequence in asked.resume.sequences)
    tenants = Tenants(TenantSettings(tokens_per_minute=3 + 16))
    async with models.open_scheduler(tenants=tenants) as scheduler:
        await scheduler.messages(asked)
        bucket = scheduler.intake._rates._buckets["default", "tokens"]
        assert round(bucket.capacity - bucket.balance) == 3 + 2 * 8


async def test_histograms_of_whole_requests_do_not_count_resumed_ones(models: Models, received: Messages) -> None:
    async with models.open_scheduler() as scheduler:
        await scheduler.messages(resumption(WHOLE, received))
        measured = scheduler.metrics.measurements
        counts = {name: histogram.counts for name, histogram in measured.histograms.items() if any(histogram.counts)}
        assert counts.keys() <= {"quire_request_queue_time_seconds", "quire_inter_token_latency_seconds"}
        num_received = sum(len(message.delta.token_ids) for message in received)
        assert measured.num_generation_tokens == 16 - num_received
        assert {kind: num for (_, kind), num in measured.tenants.num_tokens.items()} == {"generated": 16 - num_received}
        assert "quire_requests_resumed_total" in scheduler.metrics.render().decode()


async def test_a_beam_search_that_finds_other_beams_fails(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    whole = pb.GenerateRequest(
        resumable=True, token_ids=WHOLE.token_ids, sampling={"beam_width": 2, "n": 2}, stopping={"max_tokens": 4}
    )
    async with models.open_scheduler() as scheduler:
        asked = resumption(whole, (await scheduler.messages(whole))[:2])
        asked.resume.sequences[0].token_ids[0] += 1
        with pytest.raises(RequestFailed):
            await scheduler.messages(asked)
    assert caplog.text.count("found another beam 0") == 1
