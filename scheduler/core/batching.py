"""Batching modes are values: whom of those who wait the batch takes in, and when.

    continuous   whoever is first, as soon as there is room for it             Yu et al. (Orca), OSDI 2022
    static       what waits when the last batch has ended, all of it at once   as a loop over `generate` does
    dynamic      the same, but a batch that is not full is waited for          as model servers before Orca do

The last two are there to be measured against: nobody joins such a batch before the last of it has ended.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batching:
    """`is_closed`: a batch has members, fixed when it is formed (cohort.py), and nobody else comes in while it runs.

    It is formed when it is full, or when the first of its requests to arrive has waited for `timeout_s`.
    """

    name: str
    is_closed: bool = False
    timeout_s: float = 0.0


CONTINUOUS = Batching("continuous")
STATIC = Batching("static", is_closed=True)
DYNAMIC = Batching("dynamic", is_closed=True, timeout_s=0.05)

BATCHING = {batching.name: batching for batching in (CONTINUOUS, STATIC, DYNAMIC)}
