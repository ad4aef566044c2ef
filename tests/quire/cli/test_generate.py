import io
import json

import pytest

from quire.cli.generate import write_json, write_text
from quire.events import (
    Delta,
    Event,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)


def end(index: int, reason: FinishReason, num_tokens: int) -> Finished:
    return Finished(index, reason, Usage(4, num_tokens, 2, 0))


TWO: list[Event] = [
    Started("r", 4, 2),
    Delta(0, "On", (1,)),
    Delta(1, "Ein", (2,)),
    Delta(0, "ce", (3,)),
    end(0, FinishReason.EOS, 2),
    Delta(1, "mal", (4,)),
    end(1, FinishReason.LENGTH, 2),
]


def test_json_has_null_for_what_is_impossible() -> None:
    """A beam that cannot go on has the score -inf, which JSON cannot express."""
    out = io.StringIO()
    write_json([Finished(0, FinishReason.LENGTH, Usage(4, 0, 0, 0), float("-inf"))], out)
    (line,) = out.getvalue().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["score"] is None


def test_the_first_sequence_streams_and_the_others_follow() -> None:
    seen = []

    class Out(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    out = Out()
    write_text(TWO, out)
    assert out.getvalue() == "Once\n\n--- 1 ---\nEinmal\n"
    assert seen[:2] == ["On", "Once"]


def test_notes_list_tokens_and_reasons() -> None:
    out, notes = io.StringIO(), io.StringIO()
    write_text(TWO, out, notes)
    assert out.getvalue() == "Once\n\n--- 1 ---\nEinmal\n"
    assert notes.getvalue().splitlines() == [
        "[4 prompt tokens, 2 of them cached]",
        "[0: eos, 2 tokens]",
        "[1: length, 2 tokens]",
    ]


def test_a_sequence_without_text_has_a_heading() -> None:
    out = io.StringIO()
    write_text([Started("r", 1, 0), end(0, FinishReason.EOS, 0), end(1, FinishReason.EOS, 0)], out)
    assert out.getvalue() == "\n\n--- 1 ---\n\n"


def test_json_has_one_event_per_line() -> None:
    out = io.StringIO()
    write_json([Started("é", 4, 2), Delta(0, "a\nb", (1, 2)), end(0, FinishReason.STOP, 2)], out)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"event": "started", "request_id": "é", "prompt_tokens": 4, "cached_tokens": 2},
        {"event": "delta", "index": 0, "text": "a\nb", "token_ids": [1, 2], "logprobs": []},
        {
            "event": "finished",
            "index": 0,
            "reason": "stop",
            "usage": {"prompt_tokens": 4, "completion_tokens": 2, "cached_tokens": 2, "num_preemptions": 0},
            "score": None,
        },
    ]


def test_beams_have_a_heading_with_their_score() -> None:
    usage = Usage(4, 2, 0, 0)
    out = io.StringIO()
    events: list[Event] = [
        Started("r", 4, 0),
        Delta(0, "best", (1,)),
        Finished(0, FinishReason.EOS, usage, -0.25),
        Delta(1, "next", (2,)),
        Finished(1, FinishReason.LENGTH, usage, -1.5),
    ]
    write_text(events, out, are_beams=True)
    assert out.getvalue() == "\n--- 0, score -0.2500 ---\nbest\n\n--- 1, score -1.5000 ---\nnext\n"


def test_logprobs_show_the_bytes_of_tokens() -> None:
    out = io.StringIO()
    token = TokenLogprob(7, -1.0, 1, b"\xe2\x80")
    write_text(
        [Started("r", 3, 0), Delta(0, "a", (7,), (TokenLogprobs(token, (token,)),)), end(0, FinishReason.EOS, 1)], out
    )
    assert out.getvalue().count(r"b'\xe2\x80'") == 2


def test_logprobs_are_a_small_table() -> None:
    def entry(token_id: int, *top: int) -> TokenLogprobs:
        return TokenLogprobs(
            TokenLogprob(token_id, -token_id / 8, token_id), tuple(TokenLogprob(i, -i / 4, i) for i in top)
        )

    out = io.StringIO()
    events = [
        Started("r", 3, 0),
        PromptLogprobs(1, (entry(30),)),
        PromptLogprobs(2, (entry(31),)),
        Delta(0, "a", (7,), (entry(7, 1, 2),)),
        Delta(0, "b", (8,), (entry(8, 1, 2),)),
        end(0, FinishReason.EOS, 2),
    ]
    write_text(events, out)
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["ab"],
        [],
        ["prompt"],
        ["token", "logprob", "rank"],
        ["1", "30", "-3.7500", "30"],
        ["2", "31", "-3.8750", "31"],
        [],
        ["sequence", "0"],
        ["token", "logprob", "rank", "most", "probable"],
        ["0", "7", "-0.8750", "7", "1", "-0.250", "2", "-0.500"],
        ["1", "8", "-1.0000", "8", "1", "-0.250", "2", "-0.500"],
    ]


def test_the_bytes_of_tokens_are_lists_of_numbers_in_json() -> None:
    chosen = TokenLogprob(1, -0.5, 1, token_bytes=b"\xf0\x9f")
    out = io.StringIO()
    write_json([Delta(0, "", (1,), (TokenLogprobs(chosen, ()),))], out)
    (entry,) = json.loads(out.getvalue())["logprobs"]
    assert entry["chosen"]["token_bytes"] == [0xF0, 0x9F]
