"""All claims, in the order of the report."""

from bench.claims import (
    batching,
    beside_transformers,
    block_sizes,
    fixed_pool,
    fragmentation,
    kv_arithmetic,
    routing,
    shared_blocks,
    simulator,
    timeline,
    waste_by_length,
)
from bench.claims.claim import Claim

CLAIMS: tuple[Claim, ...] = (
    fragmentation.CLAIM,
    waste_by_length.CLAIM,
    batching.CLAIM,
    fixed_pool.CLAIM,
    block_sizes.CLAIM,
    timeline.CLAIM,
    shared_blocks.CLAIM,
    beside_transformers.CLAIM,
    kv_arithmetic.CLAIM,
    simulator.CLAIM,
    routing.CLAIM,
)
