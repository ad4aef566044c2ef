"""The survival measurement: its requests, its comparison, and a short run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.commands import run
from bench.overhead.survival import Survival, complaints, table
from bench.overhead.survival_jobs import KINDS, comparable, differences, jobs
from quire import CompletedSequence, Completion, FinishReason, TokenLogprob, TokenLogprobs, Usage


def completion(*token_ids: int, cached_tokens: int = 0, num_preemptions: int = 0) -> Completion:
    usage = Usage(3, len(token_ids), cached_tokens, num_preemptions)
    text = "".join(map(chr, token_ids))
    return Completion("id", 3, cached_tokens, (CompletedSequence(0, text, token_ids, FinishReason.EOS, usage),))


def test_jobs_are_of_every_kind_and_have_their_own_seeds() -> None:
    made = jobs(2 * len(KINDS), num_tokens=50, seed=3)
    assert {job.kind for job in made} == set(KINDS)
    seeds = [job.options["seed"] for job in made if job.kind != "beams"]
    assert len(set(seeds)) == len(seeds)
    assert jobs(9, 50, 3) == jobs(9, 50, 3)
    assert jobs(9, 50, 3) != jobs(9, 50, 4)


def test_equal_answers_may_have_other_cached_tokens() -> None:
    pair = completion(65, 66), completion(65, 66, cached_tokens=2, num_preemptions=1)
    assert list(differences(*map(comparable, pair))) == []


def test_every_difference_is_found() -> None:
    whole = comparable(completion(65, 66, 67))
    assert list(differences(comparable(completion(65, 67, 67)), whole)) == [
        "sequence 0: token_ids differ at 1: (67, 67) instead of (66, 67)",
        "sequence 0: text differ at 1: 'CC' instead of 'BC'",
    ]
    assert next(differences(comparable(completion(65, 66)), whole)).endswith("differ at 2: () instead of (67,)")
    sequence = whole.sequences[0]
    assert list(differences(replace(whole, sequences=(sequence, sequence)), whole)) == ["2 sequences instead of 1"]
    logprobs = (TokenLogprobs(TokenLogprob(1, -0.5, 1)),)
    assert list(differences(replace(whole, prompt_logprobs=logprobs), whole)) == ["prompt log-probabilities"]
    for change in ({"logprobs": logprobs}, {"score": -1.0}, {"reason": FinishReason.STOP}):
        other = replace(whole, sequences=(replace(sequence, **change),))  # type: ignore[arg-type]
        (line,) = differences(other, whole)
        assert line.startswith(f"sequence 0: {next(iter(change))} ")


def test_a_failure_and_a_difference_are_shown() -> None:
    survival = Survival(num_signals=20, num_resumptions=7, longest_silence_s=2.54, longest_beam_silence_s=31.0)
    survival.num_served["greedy"] += 5
    assert survival.is_complete
    survival.failures["greedy: UnavailableError: gone"] += 1
    assert not survival.is_complete
    survival.num_differing += 1
    survival.wrong += ["beams: sequence 0: score", "beams: sequence 1: text"]
    found = json.loads(json.dumps(survival.as_json()))
    assert found["failures"] == {"greedy: UnavailableError: gone": 1}
    assert found["num_requests"] == 7
    assert list(complaints({"scheduler-SIGKILL": survival})) == [
        "scheduler-SIGKILL: failed: greedy: UnavailableError: gone (1)",
        "scheduler-SIGKILL: differs: beams: sequence 0: score",
        "scheduler-SIGKILL: differs: beams: sequence 1: text",
    ]
    row = [next(iter(column.cells)) for column in table({"scheduler-SIGKILL": survival}).columns]
    assert row == ["scheduler-SIGKILL", "20", "7", "1", "1", "7", "2.5 s", "31.0 s", "0.0 s"]


def test_a_difference_alone_is_not_complete() -> None:
    assert not Survival(num_differing=1).is_complete


@pytest.mark.exhaustive
def test_a_short_run(tmp_path: Path) -> None:
    path = tmp_path / "survival.json"
    short = ["--streams", "14", "--requests", "14", "--kills", "1", "--stops", "1", "--tokens", "24"]
    faults = ["executor-SIGKILL", "scheduler-SIGSTOP", "both-SIGKILL"]
    assert run("survival", [*short, "--faults", *faults, "--json", str(path)]) == 0
    found = json.loads(path.read_text())["survival"]
    assert list(found) == ["undisturbed", *faults]
    for name in faults:
        assert found[name]["num_signals"] == 1
        assert found[name]["num_requests"] >= 14
    assert found["both-SIGKILL"]["num_resumptions"] > 0
