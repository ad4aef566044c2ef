"""Profiles: loads with long prompts, samples and a system prompt, in the same turns as the mixed trace."""

import pytest

from bench.load import RequestRecord
from bench.profiles import PROFILES
from bench.serving.measurer import LoadSettings, plan_turns
from bench.serving.serve import parse
from bench.trace import TraceRequest, make_trace
from quire.block_map import ServerInfo, ServerState

INFO = ServerInfo("0", "made up", "float32", 16384, 8000, 16, 5000, 64, 512, "fcfs", ServerState.SERVING)


def trace_of(name: str) -> list[TraceRequest]:
    (turn,) = plan_turns(LoadSettings((1,), profiles=(name,)), INFO)
    assert (turn.label, turn.concurrency) == (name, PROFILES[name].num_clients)
    return make_trace(turn.trace)


def lengths(trace: list[TraceRequest]) -> set[tuple[int, int]]:
    return {(len(request.prompt_token_ids), request.max_tokens) for request in trace}


def test_profiles_have_the_lengths_that_they_name() -> None:
    assert all(3000 <= prompt <= 4000 and output == 64 for prompt, output in lengths(trace_of("rag")))
    assert len(lengths(trace_of("rag"))) > 10
    assert lengths(trace_of("long")) == {(12_000, 64)}
    mixed = [len(request.prompt_token_ids) for request in trace_of("mixed-long")]
    assert mixed == [8000, 50, 50, 50, 50, 50] * 8
    assert {request.max_tokens for request in trace_of("mixed-long")} == {200}


def test_all_requests_of_the_system_prompt_begin_with_it() -> None:
    trace = trace_of("system-prompt")
    assert len({request.prompt_token_ids[:1024] for request in trace}) == 1
    assert len({request.prompt_token_ids[:1025] for request in trace}) > 100


def test_options_of_sampling_are_sent_only_where_a_profile_has_them() -> None:
    assert trace_of("rag")[0].sampling == {"temperature": 0}
    assert trace_of("sampled")[0].sampling == {"temperature": 0.8, "top_p": 0.95}
    assert trace_of("n4")[0].sampling == {"temperature": 0.8, "top_p": 0.95, "n": 4}


def test_rounds_have_traces_of_their_own() -> None:
    turns = plan_turns(LoadSettings((1,), num_rounds=2, num_requests=3, profiles=("rag", "n4")), INFO)
    assert [(turn.round_index, turn.label) for turn in turns] == [(0, "rag"), (0, "n4"), (1, "rag"), (1, "n4")]
    assert len({turn.trace for turn in turns}) == 4
    assert {turn.trace.num_requests for turn in turns} == {3}


def test_gaps_are_between_tokens_of_the_same_sample() -> None:
    seen = RequestRecord(0.0, (1.0, 1.1, 2.0, 2.3), 5, 4, samples=(0, 1, 0, 1))
    assert seen.itl_s == pytest.approx([1.0, 1.2])
    assert seen.tpot_s == pytest.approx(1.3)


def test_the_command_line_takes_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    _, settings = parse(["--profile", "rag,n4"])
    assert settings.load.profiles == ("rag", "n4")
    with pytest.raises(SystemExit):
        parse(["--profile", "rag,what"])
    assert "no profile is called what" in capsys.readouterr().err
