"""Computes the plans of a simulated executor, in place of `executor.device.runner`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from executor.errors import PlanRejected
from executor.plans.plan import EndReason, Publication, Reports, StepOutput, StepPlan, StepTimings
from executor.plans.retained_blocks import RetainedBlocks
from scheduler.core import FinishReason
from tests.simulation.model import SimulatedModel
from tests.simulation.translation import core_plan, published, reported
from tests.support.core.fake_executor import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.executor_host import Process
    from tests.simulation.world import World

_CODES = {
    None: EndReason.GOES_ON,
    FinishReason.EOS: EndReason.EOS,
    FinishReason.LENGTH: EndReason.LENGTH,
    FinishReason.STOP: EndReason.STOP,
}


class SimulatedRunner:
    """Computes a plan with the fake executor of the core's tests, which checks the plan and the KV that it reads."""

    def __init__(self, process: Process) -> None:
        self._process, self._world = process, process.world
        self._executor = self._empty_executor()
        self._retained = RetainedBlocks(process.num_blocks)

    def is_sane(self) -> bool:
        self._world.faults.may_raise("executor: is sane")
        return True

    def reset(self, digest_scheme: str = "", *, is_trusted: bool = True) -> Publication:
        self._world.faults.may_raise("executor: reset")
        self._retained.begin(digest_scheme, is_trusted=is_trusted)
        retained = self._retained.all()
        self._executor.digests = published(retained)
        if self._executor.digests:
            self._executor = cast("SimulatedModel", self._executor.next_epoch(0))
        else:
            self._executor = self._empty_executor(retains=bool(digest_scheme))
        return retained

    @property
    def retained(self) -> dict[int, bytes]:
        return self._executor.digests

    @property
    def kv(self) -> list[list[int | None]]:
        return self._executor.kv

    def _empty_executor(self, *, retains: bool = False) -> SimulatedModel:
        machine = self._world.machine
        sizes = machine.block_size, machine.max_num_seqs, machine.max_num_batched_tokens, machine.vocab_size
        return SimulatedModel(self._process.num_blocks, *sizes, epoch=0, retains=retains)

    def execute(self, plan: StepPlan, computing: Callable[[], None]) -> StepOutput | Launched:
        try:
            self._world.faults.may_raise("executor: execute")
        except Exception:
            self._executor.kv = [[0] * len(block) for block in self._executor.kv]  # nothing is known of a failed step
            raise
        machine = self._world.machine
        if not self._executor.epoch:
            self._executor.epoch, self._executor.step_id = plan.epoch, plan.step_id - 1
        computing()
        self._executor.num_to_defer = self._world.num_to_defer()
        try:
            self._retained.check(plan)
            result = self._executor.execute(core_plan(plan, self._process.digest))
        except PlanError as error:
            self._world.oracles.plan_refused(self._process, plan.epoch, str(error))
            raise PlanRejected(str(error)) from None
        self._executor._before.clear()  # nothing is taken back here
        self._retained.apply(plan)
        written = [block for block in self._retained.all().blocks.tolist() if block not in self._executor.digests]
        self._retained.forget(np.array(written, np.int32))
        self._world.oracles.cache.executed(self._process, plan)
        if self._world.faults.poisons(self._executor.slots.values()):
            raise RuntimeError("the step of this sequence fails")
        codes = [_CODES[reason] for reason in result.end_reasons or [None] * len(result.token_ids)]
        for place, index in enumerate(sorted(self._executor.sampled_slots)):
            slot = self._executor.slots[index]
            if place in result.deferred:
                codes[place] = EndReason.DEFERRED
            elif self._world.faults.spoils(slot.token_ids[slot.num_prompt_tokens - 1], len(slot.token_ids)):
                codes[place], slot.has_ended = EndReason.NOT_FINITE, True
        output = StepOutput(
            plan.epoch,
            plan.step_id,
            np.array(result.token_ids, np.int32),
            np.array(codes, np.uint8),
            StepTimings(1_000, int(machine.step_s * 1e9), 1_000),
            Reports(reported(result.logprobs), reported(result.prompt_logprobs), reported(result.candidates)),
        )
        return Launched(self._world, output) if machine.launches else output


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on a device that computes while the thread goes on."""

    world: World
    output: StepOutput

    def finish(self) -> StepOutput:
        self.world.faults.may_raise("executor: finish")
        return self.output
