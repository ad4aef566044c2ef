"""The blocks whose contents have a name: digests that schedulers have published, which outlive their leases.

A digest is kept until a plan writes to its block, copies over it or takes it, or a scheduler withdraws it. This module
does not know what digests mean; it knows that they were made by one *scheme*. A lease of another scheme starts without
any.
"""

import logging

import numpy as np

from executor.errors import PlanRejected
from executor.plans.plan import Ints, Publication, StepPlan
from quire.plan_stream import DIGEST_BYTES

_log = logging.getLogger(__name__)


class RetainedBlocks:
    """Keeps a digest for each published block, in the order of publication."""

    def __init__(self, num_blocks: int) -> None:
        self._scheme = ""
        self._digests: dict[int, bytes] = {}
        self._is_retained = np.zeros(num_blocks, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._digests)

    def all(self) -> Publication:
        """Returns all retained blocks, in the order of publication."""
        return Publication(np.array(list(self._digests), dtype=np.int32), b"".join(self._digests.values()))

    def begin(self, scheme: str, *, is_trusted: bool) -> None:
        """Follows a new lease, whose scheduler makes digests by this scheme. An empty scheme publishes nothing.

        is_trusted  the pool is as the plans of the last lease left it: no step has failed
        """
        reason = ""
        if not scheme:
            reason = "the new lease does not use them"
        elif scheme != self._scheme:
            reason = f"they were made by another scheme, {self._scheme!r}, not {scheme!r}"
        elif not is_trusted:
            reason = "a step has failed"
        if reason and self._digests:
            _log.info("forgot the digests of %d blocks: %s", len(self), reason)
        if reason:
            self._digests.clear()
            self._is_retained.fill(False)
        self._scheme = scheme

    def check(self, plan: StepPlan) -> None:
        """Raises PlanRejected if the plan publishes what this lease may not, or a block that has a digest."""
        blocks = plan.published.blocks
        if not blocks.size:
            return
        if not self._scheme:
            raise PlanRejected("published_blocks: the opening of this lease names no digest scheme")
        has_digest = self._is_retained[blocks] & ~np.isin(blocks, plan.withdrawn_blocks)
        if has_digest.any():
            raise PlanRejected(f"published_blocks: block {blocks[np.argmax(has_digest)]} has a digest already")

    def apply(self, plan: StepPlan) -> None:
        """Forgets and keeps digests as a plan says that `check` has accepted."""
        self.forget(plan.withdrawn_blocks)
        digests = plan.published.digests
        for index, block in enumerate(plan.published.blocks.tolist()):
            self._digests[block] = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        self._is_retained[plan.published.blocks] = True

    def forget(self, blocks: Ints) -> None:
        """Forgets the digests of blocks. A block without a digest is no error."""
        if not blocks.size:
            return
        for block in blocks[self._is_retained[blocks]].tolist():
            self._digests.pop(block, None)
        self._is_retained[blocks] = False
