"""A stream that breaks off anywhere and continues on another scheduler is what it would be without the break."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.v1 import generation_pb2 as pb
from scheduler.engine.plan_wire import ExecutorDescription
from scheduler.text.checkpoint import Checkpoint
from tests.support.scheduler import small_tokenizers
from tests.support.scheduler.broken_streams import MODEL, Messages, Models, content, resumption

PROMPT = pb.TokenIds(ids=[5, 6, 7, 8, 9, 10, 11])
EOS = (1, 17, 33, 49, 65, 81)
"""Several tokens end a text, so that some sequences end by themselves."""


def request(
    sampling: dict[str, Any] | None = None, stopping: dict[str, Any] | None = None, **fields: Any
) -> pb.GenerateRequest:
    if not fields.keys() & {"text", "chat", "token_ids"}:
        fields["token_ids"] = PROMPT
    sampling = {"seed": 4} | (sampling or {})
    if "beam_width" in sampling:
        del sampling["seed"]
    stopping = {"max_tokens": 14} | (stopping or {})
    return pb.GenerateRequest(resumable=True, sampling=sampling, stopping=stopping, **fields)


CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hello")])
LOGPROBS = pb.OutputParams(logprobs=2)

REQUESTS = {
    "ids": request(),
    "text": request(text="Once upon a time 世界"),
    "chat": request(chat=CHAT),
    "server's seed": pb.GenerateRequest(resumable=True, text="hello", stopping={"max_tokens": 8}),
    "samples": request({"n": 3}, {"max_tokens": 6}),
    "samples with EOS": request({"n": 4, "seed": 9}, {"max_tokens": 12}),
    "no EOS": request(stopping={"ignore_eos": True, "max_tokens": 20}),
    "stop ids": request({"seed": 5}, {"stop_token_ids": list(range(0, 382, 7)), "ignore_eos": True}),
    "include_stop": request({"seed": 5}, {"stop_token_ids": list(range(0, 382, 7)), "include_stop": True}),
    "log-probabilities": request({"n": 2}, {"max_tokens": 5}, output=LOGPROBS),
    "prompt": request({"n": 2}, {"max_tokens": 3}, output=pb.OutputParams(prompt_logprobs=1)),
    "long prompt": request(
        stopping={"max_tokens": 3},
        token_ids=pb.TokenIds(ids=[i % 90 + 100 for i in range(150)]),
        output=pb.OutputParams(logprobs=0, prompt_logprobs=0),
    ),
    "beams": request({"beam_width": 3, "n": 3}, {"max_tokens": 6}),
    "beams with EOS": request({"beam_width": 4, "n": 2}, {"max_tokens": 9}, token_ids=pb.TokenIds(ids=[3, 4])),
    "open-ended": pb.GenerateRequest(
        resumable=True, token_ids=pb.TokenIds(ids=[20] * 190), sampling={"seed": 3}, stopping={"ignore_eos": True}
    ),
}


KINDS = {
    "sentencepiece": small_tokenizers.sentencepiece,
    "metaspace": small_tokenizers.metaspace,
    "wordpiece": small_tokenizers.wordpiece,
}


@pytest.fixture
async def models(checkpoint: Checkpoint) -> AsyncIterator[Models]:
    models = Models(checkpoint, EOS)
    yield models
    await models.close()


async def undisturbed(models: Models, whole: pb.GenerateRequest, description: ExecutorDescription = MODEL) -> Messages:
    """Returns the messages of a stream on a scheduler that has its prompt in the prefix cache."""
    before = pb.GenerateRequest()
    before.CopyFrom(whole)
    before.stopping.max_tokens = 1
    before.stopping.ClearField("min_tokens")
    async with models.open_scheduler(description) as scheduler:
        await scheduler.messages(before)
        return await scheduler.messages(whole)


async def check_every_cut(
    models: Models, whole: pb.GenerateRequest, description: ExecutorDescription = MODEL
) -> dict[str, Any]:
    """Cuts a stream after each of its messages, and compares what follows with the undisturbed stream."""
    messages = await undisturbed(models, whole, description)
    expected = content(messages)
    for place in range(1, len(messages) + 1):
        received = messages[:place]
        async with models.open_scheduler(description) as scheduler:
            rest = await scheduler.messages(resumption(whole, received))
        assert content([*received, *rest]) == expected, f"cut after message {place} of {len(messages)}"
    return expected


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_stream_continues_after_every_message(models: Models, name: str) -> None:
    await check_every_cut(models, REQUESTS[name])


async def test_a_beam_that_was_received_ends_without_more_text(models: Models) -> None:
    detokenizer = models.tokenizer.detokenizer
    for first in range(20, 380):
        whole = request({"beam_width": 4, "n": 4}, {"max_tokens": 2, "ignore_eos": True})
        whole.token_ids.ids[:] = [first, 7]
        found = content(await undisturbed(models, whole))
        beams = [found[f"output {index}"] for index in range(4)]
        if any(detokenizer().decode(token_ids) != text for text, token_ids, _ in beams):
            await check_every_cut(models, whole)
            return
    pytest.fail("some beam should end in the middle of a character")


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_tokenizer_continues(tmp_path: Path, kind: str) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": small_tokenizers.CHAT_TEMPLATE}))
    models = Models(Checkpoint(tmp_path), EOS)
    description = replace(MODEL, vocab_size=tokenizer.get_vocab_size())
    for name in ("text", "ids", "chat"):
        for seed in range(3):
            whole = pb.GenerateRequest()
            whole.CopyFrom(REQUESTS[name])
            whole.sampling.seed, whole.stopping.ignore_eos = seed, True
            expected = await check_every_cut(models, whole, description)
            whole.stopping.stop.extend(stop_strings(expected["output 0"][0])[3])
            await check_every_cut(models, whole, description)
    await models.close()


def stop_strings(text: str) -> list[list[str]]:
    """Returns lists of stop strings: one that occurs, one that begins to occur all the time, and one that is held back
    at the end."""
    middle = len(text) // 2
    return [
        [text[middle : middle + 3]],
        [text[middle], text[middle - 2 : middle + 4]],
        [character + "\x00" for character in dict.fromkeys(text)][:16],
        [text[2:5] + "\x00", text[-3:] + "\x00", text[middle - 3 : middle + 6]],
        [text[-4:] + "\x00", "�\x00"],
    ]


@pytest.mark.parametrize("variant", range(5))
@pytest.mark.parametrize("output", [None, LOGPROBS])
@pytest.mark.parametrize("include_stop", [False, True])
async def test_stop_strings_across_the_cut(
    models: Models, variant: int, output: pb.OutputParams | None, include_stop: bool
) -> None:
    base = request(stopping={"ignore_eos": True, "max_tokens": 16})
    text = content(await undisturbed(models, base))["output 0"][0]
    assert "�" in text, "some characters should be cut in half"
    stopping = {"stop": stop_strings(text)[variant], "include_stop": include_stop, "min_tokens": variant}
    base.stopping.MergeFrom(pb.StoppingParams(**stopping))
    if output is not None:
        base.output.CopyFrom(output)
    expected = await check_every_cut(models, base)
    is_stopped = expected["end 0"].reason == pb.FINISH_REASON_STOP
    assert is_stopped == (variant in (0, 1, 3))


@settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(REQUESTS)),
    seed=st.integers(0, 2**64 - 1),
    variant=st.integers(0, 5),
    cuts=st.lists(st.integers(1, 12), max_size=3),
    pauses=st.lists(st.integers(0, 60), min_size=1, max_size=4),
)
async def test_streams_continue_after_several_breaks(
    models: Models, name: str, seed: int, variant: int, cuts: list[int], pauses: list[int]
) -> None:
    whole = pb.GenerateRequest()
    whole.CopyFrom(REQUESTS[name])
    if not whole.sampling.beam_width:
        whole.sampling.seed = seed
        text = content(await undisturbed(models, whole))["output 0"][0]
        if variant < 5 and len(text) > 8:
            whole.stopping.stop.extend(stop for stop in stop_strings(text)[variant] if stop)
    async with models.open_scheduler() as scheduler:
        whole.request_id = "a"
        expected = content(await scheduler.messages(whole))
    received: Messages = []
    asked = whole
    for most in [*cuts, None]:
        async with models.open_scheduler() as scheduler:
            received += await scheduler.messages(asked, pauses=pauses, most=most)
        asked = resumption(whole, received)
    assert content(received) == expected
