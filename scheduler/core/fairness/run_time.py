"""Decides which waiting sequences start too late to end within their deadline, so that no service is spent on them."""

from dataclasses import dataclass

from scheduler.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RunTime:
    """The estimate of the time that sequences run under load, as the engine has measured it.

    token_s            seconds for each token of a running sequence; 0: not known, so no sequence starts too late
    num_output_tokens  output to expect of a sequence, unless its bound is lower
    """

    token_s: float = 0.0
    num_output_tokens: float = 0.0

    def run_s(self, max_tokens: float) -> float:
        """Returns the time from the start of a sequence of up to `max_tokens` output tokens to its end."""
        return self.token_s * min(self.num_output_tokens, max_tokens)

    def starts_too_late(self, sequence: Sequence, now_s: float) -> bool:
        """Returns whether a sequence without output misses its deadline if it starts now, because it has waited.

        A sequence that had less time than it needs when it joined the queue is not meant: its client wants what can be
        generated in that time. Nor is one that is resumed: its stream has begun, and a new process is slow at first.
        """
        request = sequence.request
        if (
            not self.token_s
            or request.deadline_s is None
            or request.is_resumed
            or sequence.num_tokens > sequence.num_prompt_tokens
        ):
            return False
        return sequence.queued_s <= request.deadline_s - self.run_s(request.max_tokens) < now_s
