"""Faults of streams that are continued and of blocks that outlive their scheduler, put back as in `put_back.py`.

FAULTS holds the first seed that finds each fault, as `python -m tests.simulation --put-back all` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from executor.plans.retained_blocks import RetainedBlocks
from quire.resumption import ResumableRequest
from scheduler.core import Admission, Request, Scheduler
from scheduler.core.prefix_index import PrefixIndex
from scheduler.engine import plan_wire
from scheduler.requests.completion import Completion
from scheduler.requests.replay import Replay, ResumedBeams
from scheduler.servers.many_streams import ManyStreams
from scheduler.telemetry.request_observer import ObservedRequest
from tests.simulation import put_back as shell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from quire.v1 import generation_pb2 as pb
    from scheduler.telemetry.request_metrics import RequestMetrics


def held_back_text_dropped(patch: pytest.MonkeyPatch) -> None:
    """A continued stream forgets the text that was held back for a stop string."""

    def replay(completion: Completion, token_ids: Sequence[int]) -> None:
        completion._decode(token_ids)
        completion.num_tokens += len(token_ids)
        completion.num_counted = completion.num_replayed = completion.num_tokens

    patch.setattr(Completion, "replay", replay)


def half_a_character_dropped(patch: pytest.MonkeyPatch) -> None:
    """A continued stream forgets the bytes of a character that was cut in two."""
    replay = Completion.replay

    def forgetful(completion: Completion, token_ids: Sequence[int]) -> None:
        replay(completion, token_ids)
        completion._detokenizer.flush()

    patch.setattr(Completion, "replay", forgetful)


def penalties_forget(patch: pytest.MonkeyPatch) -> None:
    """The tokens that a sequence had before it was admitted again count as its prompt."""

    def encode(admission: Admission) -> Any:
        message = encode_admission(admission)
        message.params.num_prompt_tokens = len(admission.token_ids)
        return message

    encode_admission = plan_wire._encode_admission
    patch.setattr(plan_wire, "_encode_admission", encode)


def prompt_logprobs_repeated(patch: pytest.MonkeyPatch) -> None:
    rest_of = Replay.rest_of

    def rest(replay: Replay, request: Request, num_prompt_logprobs: int) -> Request:
        return rest_of(replay, request, 0)

    patch.setattr(Replay, "rest_of", rest)


def beams_repeated(patch: pytest.MonkeyPatch) -> None:
    """A beam search that started again sends the beams that its client has already."""

    def tokens(beams: ResumedBeams, index: int, token_ids: list[int], logprobs: Any = None) -> None:
        beams._stream.tokens(index, token_ids, logprobs)

    patch.setattr(ResumedBeams, "tokens", tokens)


def end_not_resumed(patch: pytest.MonkeyPatch) -> None:
    """The client does not tell the server which sequences have ended."""
    accept = ResumableRequest.accept

    def forgetful(request: ResumableRequest, message: pb.GenerateResponse) -> bool:
        return message.HasField("finished") or accept(request, message)

    patch.setattr(ResumableRequest, "accept", forgetful)


def resumed_request_measured_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A fault that this simulation found: a resumed stream that needed nothing more was never forgotten."""

    def queued(observed: ObservedRequest, request: RequestMetrics) -> None:
        if observed._facts is not None:
            observed._metrics.queued(observed._facts.engine_id, request)

    patch.setattr(ObservedRequest, "queued", queued)


def digest_scheme_not_checked(patch: pytest.MonkeyPatch) -> None:
    begin = RetainedBlocks.begin

    def trusting(retained: RetainedBlocks, scheme: str, *, is_trusted: bool) -> None:
        retained._scheme = scheme
        begin(retained, scheme, is_trusted=is_trusted)

    patch.setattr(RetainedBlocks, "begin", trusting)


def failed_step_keeps_blocks(patch: pytest.MonkeyPatch) -> None:
    begin = RetainedBlocks.begin

    def trusting(retained: RetainedBlocks, scheme: str, *, is_trusted: bool) -> None:
        begin(retained, scheme, is_trusted=True)

    patch.setattr(RetainedBlocks, "begin", trusting)


def reset_not_told(patch: pytest.MonkeyPatch) -> None:
    """The executor is not told to withdraw the blocks of a prefix cache that was reset."""
    patch.setattr(PrefixIndex, "withdraw", PrefixIndex.forget)


def reset_without_executor_lost(patch: pytest.MonkeyPatch) -> None:
    """A reset while no executor is attached has no effect on what the executor retains."""
    patch.setattr(Scheduler, "reset_prefix_cache", lambda core: core.state.cache.forget_prefixes())


def digest_without_parent(patch: pytest.MonkeyPatch) -> None:
    """The digest of a block covers its own tokens only."""
    extend_chain = PrefixIndex.extend_chain

    def extend(index: PrefixIndex, chain: list[bytes], token_ids: Sequence[int], number: int, salt: bytes) -> Any:
        size = index.block_size
        while len(chain) < number:
            start = len(chain) * size
            chain += extend_chain(index, [], token_ids[start : start + size], 1, salt)
        return chain

    patch.setattr(PrefixIndex, "extend_chain", extend)


def pause_holds_up_others(patch: pytest.MonkeyPatch) -> None:
    """A pause of one stream of a call takes the news of the other streams from the writer's list."""
    act = ManyStreams._act

    def hold_up(streams: ManyStreams, request: pb.GenerateManyRequest) -> None:
        act(streams, request)
        if request.HasField("pause"):
            streams._listed.clear()

    patch.setattr(ManyStreams, "_act", hold_up)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    shell.hang_unnoticed: 28,
    shell.unlisted_exception_ends_the_engine: 0,
    shell.client_chooses_the_epoch: 54,
    shell.few_restarts: 19,
    shell.stopped_scheduler_not_replaced: 39,
    shell.lost_event: 14,
    shell.lost_token: 0,
    shell.stop_not_carried_out: 1,
    shell.sink_kept_after_cancel: 1,
    shell.request_kept_after_cancel: 460,
    shell.turn_lost_when_cancelled: 13,
    shell.turn_never_left: 1,
    shell.broken_sink_not_told: 7,
    shell.half_cleaned: 49,
    shell.unreadable_result_ends_the_reader: 15,
    shell.late_token_counts: 2,
    shell.lease_never_released: 4,
    shell.ready_without_an_executor: 0,
    shell.requests_fail_with_their_executor: 2,
    held_back_text_dropped: 29,
    half_a_character_dropped: 2,
    penalties_forget: 2,
    prompt_logprobs_repeated: 17,
    beams_repeated: 112,
    end_not_resumed: 6,
    resumed_request_measured_for_ever: 5,
    digest_scheme_not_checked: 10,
    failed_step_keeps_blocks: 302,
    reset_not_told: 42,
    reset_without_executor_lost: 1181,
    digest_without_parent: 258,
    pause_holds_up_others: 136,
}
