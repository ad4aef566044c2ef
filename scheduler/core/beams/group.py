"""The beams of one request as sequences, whose block tables are forked and dropped.

    prompt computed → candidates → decided → planned: branches, one row a beam → candidates → …
                                   late → pause → planned: the same rows again →

The request's own sequence, the leader, computes the prompt. When the first candidates arrive, it hands its slot and
blocks to the first beam. From then on it holds nothing, and represents the group when the request waits, is preempted,
or ends.

Every beam shares the blocks of its parent. In the next step each beam writes one token: the first child in the parent's
slot, the others in new slots. If several beams share a partly filled block, all but the last one to write copy it.

The executor does not wait for the mask of a grammar. A beam whose mask is late has its row computed again after a
pause, in the same slot and blocks, and the group is decided when all its beams have reported.
"""

from math import inf

from scheduler.core.beams.search import BeamSearch, Candidates
from scheduler.core.kv_cache import KVCache
from scheduler.core.request import BeamParams
from scheduler.core.sequence import FinishReason, Sequence, State


class BeamGroup:
    """The beams of one request, in the order of the search.

    branches       the parent and the token of each beam that is decided but not yet planned
    reported       the candidates of beams, until all have reported
    late           beams whose rows are computed again, after resume_s
    num_deferrals  times in a row that some were late
    """

    def __init__(self, leader: Sequence, params: BeamParams) -> None:
        self.leader = leader
        self.params = params
        self.restart()

    def restart(self) -> None:
        """Restarts the search from the prompt. The client has received no output yet, so none has to be kept."""
        params = self.leader.params
        reasons = dict.fromkeys(params.stop_token_ids, FinishReason.STOP)
        reasons |= dict.fromkeys(params.eos_token_ids, FinishReason.EOS)
        num_new_tokens = params.max_total_tokens - self.leader.num_prompt_tokens
        self.search = BeamSearch(self.params, reasons, num_new_tokens)
        self.beams: list[Sequence] = []
        self.branches: list[tuple[Sequence, int]] = []
        self._await_reports()

    def _await_reports(self) -> None:
        self.reported: dict[Sequence, Candidates] = {}
        self.late: list[Sequence] = []
        self.num_deferrals = 0
        self.resume_s = -inf

    def decide(self) -> list[Sequence]:
        """Decides on the next beams; returns those without a continuation. Empty `branches`: the search is over."""
        candidates = self.reported
        self._await_reports()
        if not self.beams:
            self._hand_over(candidates)
        survivors = self.search.decide([candidates[beam] for beam in self.beams])
        self.branches = [(self.beams[survivor.parent], survivor.token_id) for survivor in survivors]
        parents = {parent for parent, _ in self.branches}
        dropped = [beam for beam in self.beams if beam not in parents] if survivors else []
        self.beams = [beam for beam in self.beams if beam not in dropped]
        return dropped

    def num_blocks_to_branch(self, cache: KVCache) -> int:
        """Returns the number of free blocks that the next step of the decided beams takes.

        If the step begins a block, each beam takes one. Otherwise each parent's children except the first copy one.
        """
        if self.beams[0].num_planned_tokens % cache.block_size == 0:
            return len(self.branches)
        return len(self.branches) - len(self.beams)

    def num_worst_case_blocks(self, cache: KVCache) -> int:
        """Returns the most blocks that the beams can hold. At worst they share only the full blocks of the prompt."""
        num_shared = self.leader.num_prompt_tokens // cache.block_size
        num_own = cache.num_blocks_for(self.leader.params.max_total_tokens - 1) - num_shared
        return num_shared + self.params.width * num_own

    def branch(self, cache: KVCache) -> list[tuple[Sequence, Sequence, int]]:
        """Gives each decided beam a sequence; returns (beam, parent, token) for each.

        The first child of a parent is the parent's own sequence with one more token. The others are new, and have no
        slot yet.
        """
        placed: list[tuple[Sequence, Sequence, int]] = []
        parents: set[Sequence] = set()
        for parent, token_id in self.branches:
            child = self._fork(cache, parent) if parent in parents else parent
            parents.add(parent)
            placed.append((child, parent, token_id))
        for index, (child, _, token_id) in enumerate(placed):  # after all forks, which copy the old tokens
            child.token_ids.append(token_id)
            child.index = index
        self.beams = [child for child, _, _ in placed]
        self.branches = []
        return placed

    def _fork(self, cache: KVCache, parent: Sequence) -> Sequence:
        child = self._new_beam(parent)
        cache.fork(parent, child)
        return child

    def _hand_over(self, candidates: dict[Sequence, Candidates]) -> None:
        leader, beam = self.leader, self._new_beam(self.leader)
        beam.digests = list(leader.digests)
        beam.slot, beam.row_count = leader.slot, leader.row_count
        beam.block_table, leader.block_table = leader.block_table, []
        beam.num_computed_tokens, beam.num_planned_tokens = leader.num_computed_tokens, leader.num_planned_tokens
        beam.publish_at, beam.write_limit = leader.publish_at, leader.write_limit
        leader.slot, leader.num_computed_tokens, leader.num_planned_tokens, leader.write_limit = -1, 0, 0, 0
        candidates[beam] = candidates.pop(leader)
        self.beams = [beam]

    def _new_beam(self, parent: Sequence) -> Sequence:
        beam = Sequence(parent.request, index=0, arrival=parent.arrival, account=parent.account)
        beam.token_ids = list(parent.token_ids)
        beam.state = State.RUNNING
        beam.row_count = 1
        beam.is_guaranteed = parent.is_guaranteed
        beam.num_losses, beam.loss_mark = parent.num_losses, parent.loss_mark
        beam.group_leader = self.leader
        return beam
