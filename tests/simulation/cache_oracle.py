"""Checks the blocks that outlive a scheduler: their KV belongs to their digest, and what was withdrawn stays away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.plan_stream import DIGEST_BYTES
from scheduler.core.prefix_index import PrefixIndex
from scheduler.requests.salts import tenant_salt
from tests.simulation.requests import tenant_of
from tests.simulation.translation import published
from tests.support.core.fake_executor import context_of

if TYPE_CHECKING:
    from executor.plans.plan import StepPlan as DevicePlan
    from quire.executor.v1 import executor_pb2 as pb
    from scheduler.core import StepPlan
    from scheduler.engine.engine import Engine
    from tests.simulation.executor_host import Process
    from tests.simulation.world import World


class CacheOracle:
    """Knows which KV each digest stands for, and which digests the schedulers have withdrawn."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.num_adopted = 0
        self._untold: set[bytes] = set()  # forgotten by the scheduler, which has made no plan since
        self._told: dict[tuple[int, int], set[bytes]] = {}  # by lease and step of the plan that withdraws them
        self._withdrawn: set[bytes] = set()

    def reset(self, engine: Engine) -> None:
        """Resets the prefix cache as an operator does, and notes what may not be found any more."""
        core, process = engine.core, self._world.host.process
        if core is None:
            return
        before = dict(core.state.cache.index.items())
        engine.reset_prefix_cache()
        if core.is_attached:
            self._untold |= before.keys() - dict(core.state.cache.index.items()).keys()
        elif process is not None:
            self._untold |= set(process.runner.retained.values())

    def planned(self, engine: Engine, plan: StepPlan) -> None:
        """Called with each plan of a scheduler, before it is sent."""
        if self._untold and engine._session is not None:
            self._told[engine._session._stream.lease, plan.step_id] = self._untold
            self._untold = set()

    def scheduler_lost(self) -> None:
        """Called when a scheduler has died: it cannot tell any more what it has forgotten."""
        self._untold.clear()

    def executor_started(self) -> None:
        self._told.clear()
        self._untold.clear()
        self._withdrawn.clear()

    def executed(self, process: Process, plan: DevicePlan) -> None:
        """Called after each plan that an executor has executed."""
        self._withdrawn |= self._told.pop((plan.epoch, plan.step_id), set())
        if self._withdrawn:
            self._withdrawn -= set(published(plan.published).values())
            if self._withdrawn & set(process.runner.retained.values()):
                self._world.oracles.violated("the executor retains a block that a scheduler has withdrawn")

    def adopted(self, process: Process, lease: pb.Lease) -> None:
        """Called when a scheduler gets a lease with the blocks that the executor has retained."""
        num_blocks = len(lease.retained_blocks) // 4
        self.num_adopted += num_blocks
        if not num_blocks:
            return
        known, digests = self._contents(process.digest), lease.retained_digests
        for place in range(num_blocks):
            block = int.from_bytes(lease.retained_blocks[4 * place : 4 * place + 4], "little")
            digest = digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
            right, found = known.get(digest), process.runner.kv[block]
            if right is not None and found != right:
                self._world.oracles.violated(f"block {block} holds {found}, and its digest stands for {right}")
            elif right is None and not any(client.asked.is_beam for client in self._world.clients):
                self._world.oracles.violated(f"block {block} is retained under a digest that stands for nothing")

    def _contents(self, weights: str) -> dict[bytes, list[int]]:
        """Returns the KV entries of the block that each digest stands for. The texts of beams are left out."""
        size, contents = self._world.machine.block_size, dict[bytes, list[int]]()
        index = PrefixIndex(size, "hash")
        for client in self._world.clients:
            asked, salt = client.asked, tenant_salt(tenant_of(client.asked.number), b"")
            for text in asked.texts(weights, self._world.machine.vocab_size):
                entries = context_of(text)
                for place, digest in enumerate(index.extend_chain([], text, len(text) // size, salt)):
                    contents[digest] = entries[place * size : (place + 1) * size]
        return contents
