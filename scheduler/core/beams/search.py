"""Beam search: decides which continuations survive, which have ended, and when the search is over. Pure functions.

The rules are those of `generate(num_beams=…)` in Hugging Face transformers 5 (generation/utils.py, `_beam_search`), so
that both find the same beams with the same scores.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from math import inf

from scheduler.core.plan import BeamResult
from scheduler.core.request import BeamParams
from scheduler.core.sequence import FinishReason

Candidates = tuple[SequenceOf[int], SequenceOf[float]]
"""The token ids and log-probabilities of the most probable next tokens of one beam, most probable first."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A beam of the next step: beam number `parent` of this step, and one more token."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...]  # the output
    score: float  # sum of log-probabilities


class BeamSearch:
    """One search. It begins with a single beam, the prompt. Beams are sorted, best first.

    end_reasons     the token ids that end a beam, and the reason for each
    max_new_tokens  number of output tokens at which all beams end
    """

    def __init__(self, params: BeamParams, end_reasons: Mapping[int, FinishReason], max_new_tokens: int) -> None:
        self._params = params
        self._end_reasons = end_reasons
        self._max_new_tokens = max_new_tokens
        self._num_candidates = params.num_candidates(len(end_reasons))
        self._num_tokens = 0
        self._beams = [_Beam((), 0.0)]
        self._ended: list[BeamResult] = []  # the best so far, best first

    def decide(self, candidates: SequenceOf[Candidates]) -> list[Survivor]:
        """Returns the beams of the next step, given the candidates of each beam. Empty if the search is over.

        A candidate of probability 0 (-inf) does not count, so there may be fewer survivors than `width`.
        """
        self._num_tokens += 1
        is_last = self._num_tokens == self._max_new_tokens
        width = self._params.width
        survivors: list[Survivor] = []
        beams: list[_Beam] = []
        ended: list[BeamResult] = []
        for place, (score, parent, token_id) in enumerate(islice(self._ranked(candidates), self._num_candidates)):
            if place >= width and (is_last or len(beams) == width):
                break  # no later candidate can survive or end a beam
            reason = self._end_reasons.get(token_id, FinishReason.LENGTH if is_last else None)
            if reason is None and len(beams) < width:
                survivors.append(Survivor(parent, token_id))
                beams.append(_Beam((*self._beams[parent].token_ids, token_id), score))
            elif reason is not None and place < width:  # later candidates only replace beams that end
                token_ids = [*self._beams[parent].token_ids, token_id]
                ended.append(BeamResult(token_ids, self._penalised(score), reason))
        self._beams = beams
        self._ended = sorted(self._ended + ended, key=lambda result: -result.score)[:width]
        return survivors if self._goes_on() else []

    def results(self) -> list[BeamResult]:
        """Returns the best beams that have ended, best first.

        If fewer than `num_returned` were found because too few tokens were possible, the rest are empty and score -inf.
        """
        missing = [BeamResult([], -inf, FinishReason.LENGTH)] * (self._params.num_returned - len(self._ended))
        return self._ended[: self._params.num_returned] + missing

    def _ranked(self, candidates: SequenceOf[Candidates]) -> Iterator[tuple[float, int, int]]:
        """Yields (score, beam, token) of the continuations of all beams, best first.

        Equal scores are sorted by beam, then by rank. The iterator is lazy because few continuations are read.
        """
        continuations = (self._continuations(beam, *found) for beam, found in enumerate(candidates))
        return merge(*continuations, key=lambda candidate: -candidate[0])

    def _continuations(
        self, beam: int, token_ids: SequenceOf[int], values: SequenceOf[float]
    ) -> Iterator[tuple[float, int, int]]:
        score = self._beams[beam].score
        for token_id, value in zip(token_ids, values, strict=True):
            if not value > -inf:
                return  # all later ones are impossible too
            yield score + value, beam, token_id

    def _goes_on(self) -> bool:
        if not self._beams:
            return False
        if len(self._ended) < self._params.width:
            return True
        # Like transformers, this uses the score that the best running beam would have if it ended here, although
        # with a length penalty above 0 the score could still improve.
        could_improve = self._penalised(self._beams[0].score) > self._ended[-1].score
        return could_improve and not self._params.early_stopping

    def _penalised(self, score: float) -> float:
        return float(score / self._num_tokens**self._params.length_penalty)
