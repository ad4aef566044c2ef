"""Makes what a router knows of a prompt: its key for the ring, and the digests of its blocks."""

from array import array

from gateway.routing.choice import Prompt
from planning.fleet.observed_index import short_digest
from planning.workload import Job
from scheduler.core import Request
from scheduler.core.prefix_index import PrefixIndex

_NUM_KEY_TOKENS = 256
"""Tokens from which the ring's key is made, as in the gateway."""


class PromptDigests:
    """Computes digests as the cores do. Those of a system prompt are computed once.

    has_digests  False: the prefix caches are off, because no prompts are shared
    """

    def __init__(self, block_size: int, *, has_digests: bool) -> None:
        self._index = PrefixIndex(block_size)
        self._has_digests = has_digests
        self._shared: dict[tuple[int, int, int], tuple[list[bytes], list[int]]] = {}

    def prompt_of(self, request: Request, job: Job) -> Prompt:
        tokens, size = request.prompt_token_ids, self._index.block_size
        key = array("I", tokens[:_NUM_KEY_TOKENS]).tobytes()
        if not self._has_digests:
            return Prompt(key, len(tokens), (), size)
        chain, digests = self._shared_digests(request, job)
        chain = self._index.extend_chain(list(chain), tokens, (len(tokens) - 1) // size, request.cache_salt)
        own = [short_digest(digest) for digest in chain[len(digests) :]]
        return Prompt(key, len(tokens), [*digests, *own], size)

    def _shared_digests(self, request: Request, job: Job) -> tuple[list[bytes], list[int]]:
        place = (job.tenant, job.system_prompt, job.num_shared_tokens)
        found = self._shared.get(place)
        if found is None:
            num_blocks = job.num_shared_tokens // self._index.block_size
            chain = self._index.extend_chain([], request.prompt_token_ids, num_blocks, request.cache_salt)
            found = self._shared[place] = (chain, [short_digest(digest) for digest in chain])
        return found
