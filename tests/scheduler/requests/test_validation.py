"""Tests every field with hostile values: each is a violation of the field, or a clear refusal."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler.core import BeamParams, CapacityExceeded, InvalidRequest
from scheduler.text.chat_messages import ChatMessage
from tests.support.scheduler.validator_rig import BOUNDS, Unread, V, admit, check, request, violations

NAN, INF = float("nan"), float("inf")
BAD_IDS = [-1, V, V + 1, 2**32 - 1, 2**64, True, 1.0, "1", None]
NOT_NUMBERS = [NAN, INF, -INF, True, "1", 10**400, -(10**400), [1.0]]
NOT_WHOLE = [-1, 2**64, 10**5000, 1.0, NAN, True, "1", [1]]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, -1e-45, 100.5, *NOT_NUMBERS]),
        ("top_p", [0, 0.0, 7e-46, 1e-50, -0.5, 1.0000001, 2, *NOT_NUMBERS]),
        ("min_p", [-0.001, 1.5, *NOT_NUMBERS]),
        ("top_k", [2**32, *NOT_WHOLE]),
        ("seed", NOT_WHOLE),
        ("n", [0, 9, 2**32 - 1, *NOT_WHOLE]),
        ("repetition_penalty", [0.0, 1e-45, -1.0, 10.5, *NOT_NUMBERS]),
        ("frequency_penalty", [2.1, -2.1, *NOT_NUMBERS]),
        ("presence_penalty", [2.1, -2.1, *NOT_NUMBERS]),
        ("beam_width", [9, 65, 2**32 - 1, *NOT_WHOLE]),
        ("logit_bias", [[1], "1", 5, dict.fromkeys(range(1025), 1.0)]),
        ("allowed_token_ids", [[1] * 65537, "12", 5, {1: 1.0}]),
        ("length_penalty", [1.0, NAN, 11, -INF]),  # there is no beam search
        ("early_stopping", [True, False, 1]),
    ],
)
def test_bad_sampling_parameters_are_violations(field: str, values: list[Any]) -> None:
    for value in values:
        assert list(violations(request(sampling={field: value}))) == [f"sampling.{field}"], value


@pytest.mark.parametrize("bad", BAD_IDS)
def test_first_bad_token_id_of_sampling_is_a_violation(bad: Any) -> None:
    assert list(violations(request(sampling={"allowed_token_ids": [1, bad, bad]}))) == ["sampling.allowed_token_ids[1]"]
    assert list(violations(request(sampling={"logit_bias": {5: 0.5, bad: 1.0}}))) == [f"sampling.logit_bias[{bad!r}]"]


def test_every_bad_bias_is_a_violation() -> None:
    for bad in (100.5, -100.5, None, *NOT_NUMBERS):
        found = violations(request(sampling={"logit_bias": {1: bad, 2: 0.5, 3: bad}}))
        assert list(found) == ["sampling.logit_bias[1]", "sampling.logit_bias[3]"]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("sampling.temperature", [0.5, 1.0, 1e-9, NAN]),
        ("sampling.top_p", [1.0, 0.5]),
        ("sampling.top_k", [0, 5]),
        ("sampling.min_p", [0.0, 0.5]),
        ("sampling.seed", [0, 7]),
        ("sampling.n", [5, 8, 0]),
        ("sampling.length_penalty", [10.5, -10.5, *NOT_NUMBERS]),
        ("sampling.early_stopping", [1, "yes"]),
        ("stopping.stop", [["end"]]),
        ("output.logprobs", [0, 5]),
        ("output.prompt_logprobs", [0, 5]),
    ],
)
def test_fields_that_exclude_a_beam_search(field: str, values: list[Any]) -> None:
    group, name = field.split(".")
    for value in values:
        parts: dict[str, dict[str, Any]] = {"sampling": {"beam_width": 4}, "stopping": {}, "output": {}}
        parts[group][name] = value
        assert list(violations(request(**parts))) == [field], value


def test_beam_width_needs_enough_tokens_in_the_vocabulary() -> None:
    for vocab_size, stop_token_ids, fits in [(16, [], True), (15, [], False), (16, [5], False), (24, [5], True)]:
        bounds = replace(BOUNDS, vocab_size=vocab_size)
        fields = request({"beam_width": 8}, {"stop_token_ids": stop_token_ids})
        if fits:
            assert check(fields, bounds).complete([1], bounds, request_id=1, deadline_s=None).beam == BeamParams(8, 1)
        else:
            assert list(violations(fields, bounds)) == ["sampling.beam_width"]


def test_beam_width_needs_enough_allowed_tokens() -> None:
    assert check(request({"beam_width": 2, "allowed_token_ids": [5, 6, 7, 8, 5]}), BOUNDS)
    for allowed in ([5, 6, 7], [5, 6, 7, 7]):
        found = violations(request({"beam_width": 2, "allowed_token_ids": allowed}))
        assert list(found) == ["sampling.beam_width"]


def test_bad_beam_width_hides_violations_that_depend_on_it() -> None:
    found = violations(request({"beam_width": 1000, "length_penalty": 0.5, "early_stopping": True}))
    assert list(found) == ["sampling.beam_width"]


def test_min_tokens_needs_an_allowed_token_that_does_not_end_the_text() -> None:
    """EOS is token 2."""
    least = {"min_tokens": 1, "stop_token_ids": [4, 5]}
    for allowed in ([2], [4, 5], [2, 4, 5, 5]):
        assert list(violations(request({"allowed_token_ids": allowed}, least))) == ["sampling.allowed_token_ids"]
        admit(request({"allowed_token_ids": allowed}, least | {"min_tokens": 0}))
        admit(request({"allowed_token_ids": [*allowed, 7]}, least))
    bounds = replace(BOUNDS, vocab_size=3)
    everything = request({}, {"min_tokens": 1, "stop_token_ids": [0, 1]}, token_ids=[1])
    assert list(violations(everything, bounds)) == ["sampling.allowed_token_ids"]


@pytest.mark.parametrize(
    ("field", "values", "path"),
    [
        ("max_tokens", [0, 2**32, *NOT_WHOLE], "stopping.max_tokens"),
        ("min_tokens", [2**32, *NOT_WHOLE], "stopping.min_tokens"),
        ("stop", [["a"] * 17, "stop", b"stop", 5], "stopping.stop"),
        (
            "stop",
            [["a", ""], ["a", "x" * 257], ["a", "é" * 129], ["a", "\ud800"], ["a", 5], ["a", ["b"]]],
            "stopping.stop[1]",
        ),
        ("stop_token_ids", [[1] * 65, "12", 5], "stopping.stop_token_ids"),
        ("stop_token_ids", [[4, 5, bad] for bad in BAD_IDS], "stopping.stop_token_ids[2]"),
        ("ignore_eos", [1, "yes", 0.0], "stopping.ignore_eos"),
        ("include_stop", [1, "no"], "stopping.include_stop"),
    ],
)
def test_bad_stopping_parameters_are_violations(field: str, values: list[Any], path: str) -> None:
    for value in values:
        assert list(violations(request(stopping={field: value}))) == [path], value


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"request_id": "x" * 257}, "request_id"),
        ({"request_id": "é" * 129}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "a\x00"}, "request_id"),
        ({"request_id": "\udfff"}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"cache_salt": "x" * 2**20}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"priority": 2**31}, "priority"),
        ({"priority": -(2**31) - 1}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"text": "x" * (2 * 2**20 + 1)}, "text"),
        ({"text": "é" * (2**20 + 1)}, "text"),
        ({"text": "a\ud800"}, "text"),
        ({"text": 5}, "text"),
        ({"token_ids": []}, "token_ids.ids"),
        ({"token_ids": "abc"}, "token_ids.ids"),
        ({"token_ids": 5}, "token_ids.ids"),
        ({"chat": []}, "chat.messages"),
        ({"chat": "hello"}, "chat.messages"),
        ({"chat": [ChatMessage("user", "a")] * 1025}, "chat.messages"),
        ({"chat": [ChatMessage("", "a")]}, "chat.messages[0].role"),
        ({"chat": [ChatMessage("user", "a"), ChatMessage("user", "\ud800")]}, "chat.messages[1].content"),
        ({"chat": [ChatMessage("user", "x" * 2**20)] * 3}, "chat.messages[1].content"),
        ({"text": None, "token_ids": None}, "prompt"),
        ({"text": "a", "token_ids": [1]}, "prompt"),
    ],
)
def test_other_bad_fields_are_violations(fields: dict[str, Any], path: str) -> None:
    assert list(violations(request(**fields))) == [path]


@pytest.mark.parametrize("bad", BAD_IDS)
def test_first_bad_prompt_token_id_is_a_violation(bad: Any) -> None:
    found = violations(request(token_ids=[1, bad, 2, bad]))
    assert list(found) == ["token_ids.ids[1]"]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_bad_output_parameters_are_violations(field: str) -> None:
    for value in (21, 2**32 - 1, *NOT_WHOLE):
        assert list(violations(request(output={field: value}))) == [f"output.{field}"]


def test_logprobs_are_limited_to_the_vocabulary() -> None:
    assert list(violations(request(output={"logprobs": 11}, token_ids=[1]), replace(BOUNDS, vocab_size=10)))


def test_chat_needs_a_template() -> None:
    bounds = replace(BOUNDS, has_chat_template=False)
    assert list(violations(request(chat=[ChatMessage("user", "hi")]), bounds)) == ["chat"]


def test_all_violations_are_reported_at_once() -> None:
    found = violations(
        request(
            sampling={
                "temperature": NAN,
                "n": 0,
                "beam_width": 3,
                "top_p": 2,
                "logit_bias": {V: 1.0, 5: INF},
                "allowed_token_ids": [V + 1],
                "repetition_penalty": 0,
            },
            output={"logprobs": 1, "prompt_logprobs": 10**9},
            stopping={"stop": [""], "min_tokens": 5, "max_tokens": 4},
            request_id="\n",
            token_ids=[-1],
        )
    )
    assert set(found) == {
        "sampling.temperature",
        "sampling.n",
        "sampling.top_p",
        f"sampling.logit_bias[{V}]",
        "sampling.logit_bias[5]",
        "sampling.allowed_token_ids[0]",
        "sampling.repetition_penalty",
        "output.logprobs",
        "output.prompt_logprobs",
        "stopping.stop[0]",
        "stopping.min_tokens",
        "request_id",
        "token_ids.ids[0]",
    }


def test_messages_are_short_for_long_values() -> None:
    found = violations(request(token_ids=["x" * 10_000], sampling={"seed": 10**5000}))
    assert all(len(problem) < 200 for problem in found.values())
    assert violations(request({"seed": "x" * 10_000}))["sampling.seed"].endswith(
        "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…"
    )


def test_values_that_are_too_large_are_not_read() -> None:
    large = Unread([0] * 70_000)
    for name in ("temperature", "top_p", "seed", "n", "beam_width", "logit_bias", "allowed_token_ids"):
        assert list(violations(request(sampling={name: large}))) == [f"sampling.{name}"]
    for name in ("max_tokens", "stop", "stop_token_ids", "ignore_eos"):
        assert list(violations(request(stopping={name: large}))) == [f"stopping.{name}"]
    assert list(violations(request(output={"logprobs": large}))) == ["output.logprobs"]
    for name in ("text", "request_id", "cache_salt", "priority"):
        assert list(violations(request(**{name: large}))) == [name]
    assert list(violations(request(chat=large))) == ["chat.messages"]
    with pytest.raises(CapacityExceeded):
        admit(request(token_ids=large))


def test_number_of_reported_violations_is_limited() -> None:
    found = violations(request(sampling={"logit_bias": dict.fromkeys(range(1000), NAN)}))
    assert len(found) == 64


# --- capacity ---


@pytest.mark.parametrize(
    ("num_prompt", "stopping"),
    [
        (64, {}),
        (1000, {}),
        (60, {"max_tokens": 5}),
        (3, {"max_tokens": 2**32 - 1}),
        (60, {"min_tokens": 5}),  # max_tokens is absent, and less than min_tokens is left
        (3, {"min_tokens": 2**32 - 1}),
    ],
)
def test_requests_that_never_fit_are_refused_in_words_that_clients_read(
    num_prompt: int, stopping: dict[str, Any]
) -> None:
    """Claude Code compacts a conversation after the first message, and asks for less output after the second."""
    words = rf"^prompt is too long: {num_prompt} tokens > 63 maximum$"
    if num_prompt < 64:
        num_output = max(stopping.values())
        words = rf"^input length and `max_tokens` exceed context limit: {num_prompt} \+ {num_output} > 64$"
    with pytest.raises(CapacityExceeded, match=words):
        admit(request(token_ids=[1] * num_prompt, stopping=stopping))
    with pytest.raises(CapacityExceeded, match=words):
        admit(request(text="…", stopping=stopping), num_prompt=num_prompt)


def test_requests_that_just_fit_are_admitted() -> None:
    assert admit(request(token_ids=[1] * 63)).params.max_total_tokens == 64
    assert admit(request(token_ids=[1] * 60, stopping={"max_tokens": 4})).params.max_total_tokens == 64
    params = admit(request(token_ids=[1] * 60, stopping={"min_tokens": 4})).params
    assert (params.min_total_tokens, params.max_total_tokens) == (64, 64)


def test_prompt_needs_tokens_that_the_model_has() -> None:
    checker = check(request(text="x"))
    for prompt in ([], [1, V]):
        with pytest.raises(InvalidRequest) as caught:
            checker.complete(prompt, BOUNDS, request_id=1, deadline_s=None)
        assert list(caught.value.violations) == ["prompt"]
