"""Memory modes are values: where the blocks of a sequence come from.

    paged                     a block when a token needs one, any block                     Kwon et al., SOSP 2023
    contiguous                one run of blocks from admission to end, for max_model_len tokens
    contiguous-power-of-two   the same, for the prompt and the power of two that its output needs
    contiguous-exact          the same, for what it will write, and no more: an oracle

The contiguous ones are there to be measured against. They are the baselines of section 6.1 of that paper, Orca (Max),
Orca (Pow2) and Orca (Oracle), in one pool with paging: a run is so many consecutive blocks, placed first-fit. The last
two know the length of an output in advance. `max_total_tokens` stands for it: true for requests that ignore EOS.

Runs are not shared: prefixes are not cached, and a request is one sequence. They are not outgrown either: so nobody who
was admitted is ever preempted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.core.request import Request


@dataclass(frozen=True, slots=True)
class Memory:
    """`run_length`: slots (places for a token) that a request holds in one run, given max_model_len; 0 under paging."""

    name: str
    run_length: Callable[[Request, int], int]
    is_contiguous: bool = True


def _nothing(request: Request, max_model_len: int) -> int:
    return 0


def _longest(request: Request, max_model_len: int) -> int:
    return max_model_len


def _power_of_two(request: Request, max_model_len: int) -> int:
    num_prompt_tokens = len(request.prompt_token_ids)
    num_output_tokens = request.params.max_total_tokens - num_prompt_tokens
    return min(num_prompt_tokens + (1 << (num_output_tokens - 1).bit_length()), max_model_len)


def _exact(request: Request, max_model_len: int) -> int:
    """The KV of the last token is never needed."""
    return request.params.max_total_tokens - 1


PAGED = Memory("paged", _nothing, is_contiguous=False)
CONTIGUOUS = Memory("contiguous", _longest)
CONTIGUOUS_POWER_OF_TWO = Memory("contiguous-power-of-two", _power_of_two)
CONTIGUOUS_EXACT = Memory("contiguous-exact", _exact)

MEMORY = {memory.name: memory for memory in (PAGED, CONTIGUOUS, CONTIGUOUS_POWER_OF_TWO, CONTIGUOUS_EXACT)}
