"""Structured output through real processes: every text that ends by itself is one of its grammar, whatever happens."""

import asyncio
import json
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import AsyncClient, CompletedSequence, FinishReason, InvalidRequestError
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import OPENINGS, Job, StreamGroup, differences, mixed_jobs, outcomes

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["fox", "owl", None]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "friends"],
    "additionalProperties": False,
}
CHOICES = ["the fox", "the owl", "the fox and the owl", 'a "quoted" \\ text\n']
REGEX = r"[A-Z][a-z]{2,6}( (and|or) [a-z]{2,6}){1,4}[.!]"
LARK = 'start: "(" item ("," item)~1..3 ")"\nitem: /[a-z]{1,5}/ | start'


def is_json_of(schema: dict[str, Any]) -> Callable[[str], bool]:
    def is_valid(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    return is_valid


def is_in_parentheses(text: str) -> bool:
    """Checks a text of LARK: replaces the innermost lists by items until one is left."""
    inner = re.compile(r"\((?:[a-z]{1,5}|#)(?:,(?:[a-z]{1,5}|#)){1,3}\)")
    while text != "#":
        text, number = inner.subn("#", text)
        if not number:
            return False
    return True


KINDS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json_schema": ({"json_schema": SCHEMA}, is_json_of(SCHEMA)),
    "json_object": ({"json_object": True}, is_json_of({"type": "object"})),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "lark": ({"lark": LARK}, is_in_parentheses),
}
"""The options of each kind of grammar, and the check of a text that has ended by itself."""

JOBS = [
    Job(OPENINGS[i % len(OPENINGS)], {**options, "temperature": 0.9, "seed": i, "n": 1 + i % 2, "max_tokens": 120})
    for i, options in enumerate([grammar for grammar, _ in KINDS.values()] * 3)
]


@pytest.fixture(scope="module")
def served_stack() -> Iterator[Stack]:
    with Stack(max_num_seqs=64) as stack:
        yield stack


@pytest.fixture
def served(served_stack: Stack) -> Stack:
    served_stack.show_log()
    return served_stack


def check(sequences: tuple[CompletedSequence, ...], is_valid: Callable[[str], bool]) -> int:
    """Checks the sequences that have ended by EOS; returns their number."""
    ended = [sequence for sequence in sequences if sequence.reason is FinishReason.EOS]
    for sequence in ended:
        assert is_valid(sequence.text), repr(sequence.text)
    return len(ended)


@pytest.mark.parametrize("kind", KINDS)
async def test_samples_are_texts_of_the_grammar(served: Stack, kind: str) -> None:
    options, is_valid = KINDS[kind]
    async with served.client() as client:
        calls = [
            client.complete(opening, **options, n=4, temperature=1.0, seed=seed, max_tokens=200)
            for seed, opening in enumerate(OPENINGS)
        ]
        completions = await asyncio.gather(*calls)
        greedy = await client.complete(OPENINGS[0], **options, temperature=0, max_tokens=200)
    num_ended = sum(check(completion.sequences, is_valid) for completion in completions)
    check(greedy.sequences, is_valid)
    assert num_ended >= (1 if kind in ("json_object", "lark") else 4 * len(OPENINGS) - 4)  # these two can go on


async def test_outputs_are_the_same_alone_and_in_a_batch_and_neighbours_are_unchanged(served: Stack) -> None:
    neighbours = mixed_jobs(12)
    async with served.client() as client:
        alone = [(await outcomes(client, [job]))[0] for job in JOBS]
        undisturbed = await outcomes(client, neighbours)
        together = await outcomes(client, [*JOBS, *neighbours])
    assert differences(together[: len(JOBS)], alone) == []
    assert differences(together[len(JOBS) :], undisturbed) == []


@pytest.mark.parametrize("service", ["executor", "scheduler"])
async def test_streams_survive_a_killed_service(served: Stack, service: str) -> None:
    async with served.client() as client:
        expected = await outcomes(client, JOBS)
        streams = StreamGroup(client, JOBS).start()
        await streams.until(lambda streams: streams.all_have(2))
        assert streams.num_running > 0
        served.send(service, signal.SIGKILL)
        assert differences(await streams.ended(), expected) == []
    await served.until_health("SERVING")


async def test_masks_that_take_long_hold_up_no_other_request(served: Stack) -> None:
    """The grammar is ambiguous: its masks take some ten milliseconds, and more with each token."""
    ways = 40
    lark = "\n".join(
        ['start: "ab" x "!"', f"x: {' | '.join(f'x y{i}' for i in range(ways))} | "]
        + [f'y{i}: x "a" | "b" x | x x' for i in range(ways)]
    )
    slow = Job(OPENINGS[0], {"lark": lark, "temperature": 1.0, "seed": 1, "max_tokens": 6})
    beams = Job(OPENINGS[1], {"lark": lark, "beam_width": 3, "n": 2, "max_tokens": 3})
    neighbours = mixed_jobs(8)
    async with served.client() as client:
        undisturbed = await outcomes(client, neighbours)
        deferred = await num_deferred(served)
        together = await outcomes(client, [slow, beams, *neighbours, slow, beams])
        again = await outcomes(client, [slow, beams])
    assert await num_deferred(served) > deferred
    assert differences(together[2:-2], undisturbed) == []
    assert differences(together[:2] + together[-2:], again * 2) == []
    for output in (*again[0].outputs, *again[1].outputs):
        assert re.fullmatch("ab[ab]*!?", output.text)


async def num_deferred(served: Stack) -> float:
    page = await asyncio.to_thread(urllib.request.urlopen, f"http://{served.metrics}/metrics", None, 30)
    text = page.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return families["quire_executor_grammar_deferred"].samples[0].value


async def test_beams_are_texts_of_the_grammar(served: Stack) -> None:
    async with served.client() as client:
        for kind in ("json_schema", "regex", "choice"):
            options, is_valid = KINDS[kind]
            completion = await client.complete(OPENINGS[1], **options, beam_width=3, n=3, max_tokens=150)
            found = [sequence for sequence in completion.sequences if sequence.token_ids]
            assert check(tuple(found), is_valid) > 0
            assert len({sequence.token_ids for sequence in found}) == len(found)  # two may spell the same text


async def test_preempted_sequences_keep_their_grammar() -> None:
    jobs = [replace(job, options=job.options | {"n": 1}) for job in JOBS]
    async with Stack(num_blocks=24, max_num_seqs=8) as stack, stack.client() as client:
        alone = [(await outcomes(client, [job]))[0] for job in jobs]
        together = await outcomes(client, jobs)
        assert (await client.block_map()).num_preemptions > 0
    assert differences(together, alone) == []


async def test_stop_strings_and_lengths_end_the_beginning_of_a_text(served: Stack) -> None:
    async with served.client() as client:
        stopped = await client.complete("Once", json_schema=SCHEMA, stop='"age"', temperature=0, max_tokens=100)
        short = await client.complete("Once", regex="(ab)+c", temperature=0, max_tokens=1)
        only = await client.complete("Once", choice=["yes"], temperature=0, max_tokens=50)
    assert stopped.sequences[0].reason is FinishReason.STOP
    assert stopped.sequences[0].text.startswith("{")
    assert (short.sequences[0].reason, short.sequences[0].text[:1]) == (FinishReason.LENGTH, "a")
    assert (only.sequences[0].reason, only.sequences[0].text) == (FinishReason.EOS, "yes")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"json_schema": {"type": "strin"}}, "structured_output.json_schema"),
        ({"regex": "("}, "structured_output.regex"),
        ({"lark": "start: absent"}, "structured_output.lark"),
        ({"choice": []}, "structured_output.choice.texts"),
        ({"regex": "a", "ignore_eos": True}, "stopping.ignore_eos"),
        ({"regex": "a", "min_tokens": 3}, "stopping.min_tokens"),
        ({"regex": "a", "allowed_token_ids": [5]}, "sampling.allowed_token_ids"),
    ],
)
async def test_bad_requests_are_refused_by_name(served: Stack, options: dict[str, Any], field: str) -> None:
    async with served.client() as client:
        await refused(client, options, field)
        assert (await client.complete("Once", regex="[a-z]", max_tokens=5)).sequences[0].reason is FinishReason.EOS


async def refused(client: AsyncClient, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        await client.complete("Once", **options)
    assert list(raised.value.violations) == [field]
