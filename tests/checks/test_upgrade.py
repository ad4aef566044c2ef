"""The upgrade check: what counts as a good outcome, what as a reason, and which commit it takes."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from checks import upgrade
from checks.steps import CheckFailed
from checks.upgrade import MAX_REFUSAL_S, NUM_STREAMS, Outcome, judged, other_protocol, protocol, refusal

TOKENS = [[[1, 2, 3], [4]] for _ in range(NUM_STREAMS)]
EXPECTED = Outcome(TOKENS, [], 3.0, "", 3.0)
REASON = "the executor speaks version 3 of the plan stream"


def refused(num_refused: int = NUM_STREAMS, *, reason: str = REASON, reason_s: float = 0.2) -> Outcome:
    return Outcome(TOKENS[num_refused:], ["it failed"] * num_refused, 15.0, reason, reason_s)


def test_equal_tokens_are_good() -> None:
    assert judged(Outcome(TOKENS, [], 9.0, "", 9.0), EXPECTED) == "64 of 64 streams have the same 256 tokens"


def test_a_refusal_of_all_streams_by_its_reason_is_good() -> None:
    verdict = judged(refused(), EXPECTED)
    assert verdict.startswith("refused after 0.2 s, and 64 of 64 streams have failed after 15.0 s")
    assert verdict.endswith(REASON)


@pytest.mark.parametrize(
    ("actual", "problem"),
    [
        (Outcome([[[1, 2, 9], [4]], *TOKENS[1:]], [], 9.0, "", 9.0), "1 of 64 streams have other tokens"),
        (Outcome([[[1, 2, 3]], *TOKENS[1:]], [], 9.0, "", 9.0), "1 of 64 streams have other tokens"),
        (refused(1), "only 1 streams were refused"),
        (refused(reason=""), "the scheduler gives no reason"),
        (refused(reason_s=MAX_REFUSAL_S + 0.1), "the refusal took 5.1 s"),
    ],
)
def test_any_other_outcome_fails(actual: Outcome, problem: str) -> None:
    with pytest.raises(CheckFailed, match=problem):
        judged(actual, EXPECTED)


@pytest.mark.parametrize("source", ["readyz", "log"])
async def test_a_reason_is_found_in_readyz_and_in_the_log(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, page = tmp_path / "scheduler.log", ["waiting for an executor"]
    log.write_text("INFO starts\n")
    monkeypatch.setattr(upgrade, "ready_text", lambda http: page[0])
    waiting = asyncio.create_task(refusal("", log, 0.0))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "no reason is given yet"
    if source == "readyz":
        page[0] = REASON
    else:
        log.write_text(f"INFO starts\n{REASON}\n")
    reason, _ = await asyncio.wait_for(waiting, 20)
    assert reason == REASON


def test_the_newest_commit_of_another_version_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "ROOT", tmp_path)

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(text: str) -> str:
        (tmp_path / "quire" / "plan_stream.py").write_text(text)
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", "x")
        return git("rev-parse", "HEAD")

    git("init", "-q")
    (tmp_path / "quire").mkdir()
    commit("PROTOCOL_VERSION = 1\n")
    newest_old = commit("PROTOCOL_VERSION = 1\nFEATURES = ()\n")
    commit("PROTOCOL_VERSION = 2\n")
    commit("PROTOCOL_VERSION = 2\nFEATURES = ()\n")
    assert protocol("HEAD") == "PROTOCOL_VERSION = 2"
    assert protocol("no-such-commit") == ""
    assert other_protocol() == newest_old


def test_a_tree_with_one_version_has_no_other_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "protocol", lambda commit: "PROTOCOL_VERSION = 2")
    with pytest.raises(CheckFailed, match="no commit has another version"):
        other_protocol()
