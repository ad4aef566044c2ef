"""The grammar of one slot, and how long a step waits for its mask."""

import time
from dataclasses import dataclass

from executor.grammars.followed import FollowedGrammar, GrammarKey
from executor.grammars.workers import Pending

MAX_WAIT_S = 0.01
"""The longest time for which a step waits for its masks. Nearly all are there before it needs them."""


class Patience:
    """The time that is left for all masks of a step. The clock starts with the first wait."""

    def __init__(self) -> None:
        self._deadline_s: float | None = None

    def deadline_s(self) -> float:
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + MAX_WAIT_S
        return self._deadline_s


@dataclass(slots=True)
class SlotGrammar:
    """The grammar of a slot, and its state.

    key                None: the grammar cannot be followed
    num_prompt_tokens  tokens of the sequence that are not output
    has_waited         it has been deferred for this mask already, and no step waits for the mask again
    is_own             no other slot and no cache has this state
    is_deferred        the step did not wait for the mask: the sequence gets no token, and comes back
    """

    pending: Pending
    key: GrammarKey | None = None
    num_prompt_tokens: int = 0
    has_waited: bool = False
    is_own: bool = False
    is_deferred: bool = False

    def state(self, patience: Patience) -> FollowedGrammar:
        """Returns the state whose mask a step needs. If the step does not wait for it, all tokens are allowed."""
        if not self.is_deferred:
            state = self.pending.state_by(0.0 if self.has_waited else patience.deadline_s())
            if state is not None:
                return state
            self.is_deferred = True
        return self.pending.failed
