"""Checks the rules that hold in every world."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import grpc

from scheduler.core import check_invariants
from scheduler.engine.engine import ServerState
from scheduler.engine.failures import MAX_FAILURES
from scheduler.requests.response_stream import ResponseStream
from tests.simulation.cache_oracle import CacheOracle
from tests.simulation.faults import ALL, SCOPES

if TYPE_CHECKING:
    from quire.events import Finished
    from scheduler.core import Scheduler, StepPlan
    from scheduler.engine.engine import Engine
    from tests.simulation.clients import Client
    from tests.simulation.executor_host import Process
    from tests.simulation.scheduler_host import SchedulerProcess
    from tests.simulation.world import World

Code = grpc.StatusCode
SLACK_S = 0.1
SETTLED_S = 20.0
"""Time after the last fault, after which an executor cannot be lost any more: every time-out is over."""
MAX_LOSSES = 5


class Violation(Exception):
    """A world broke a rule."""


class Oracles:
    """Collects violations, and what justifies the errors that clients receive."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[str] = []
        self._losses: list[tuple[float, bool]] = []  # the times, and whether the poison was the cause
        self._scheduler_losses_s: list[float] = []
        self._is_poisoned = False
        self.has_stopped_schedulers = False
        self.cache = CacheOracle(world)
        self.leases: dict[int, set[int]] = {}
        self.processes: list[tuple[float, Process]] = []
        self._could_serve_s = 0.0
        self.drains_s: list[tuple[float, float]] = []

    def violated(self, problem: str) -> None:
        self._world.log(f"VIOLATION {problem}")
        self.violations.append(problem)

    # --- what happened ------------------------------------------------------------------------------------------

    def executor_started(self, process: Process) -> None:
        self.processes.append((self._world.now_s, process))
        self._could_serve_s = self._world.now_s
        self.cache.executor_started()

    def plan_refused(self, process: Process, epoch: int, problem: str) -> None:
        """An executor has found a fault in a plan, which only a scheduler that means harm may send."""
        if epoch in self.leases.get(process.number, ()):
            self.violated(f"the scheduler sent a plan with a fault: {problem}")

    def step_poisoned(self) -> None:
        self._is_poisoned = True

    def executor_lost(self) -> None:
        self._losses.append((self._world.now_s, self._is_poisoned))
        if self._world.now_s > self._world.healed_s + SETTLED_S:
            self.violated("a healthy executor is lost")
        self._is_poisoned = False

    def scheduler_lost(self, process: SchedulerProcess) -> None:
        self._scheduler_losses_s.append(self._world.now_s)
        self.cache.scheduler_lost()
        if not process.is_ending and self._world.now_s > self._world.healed_s + SETTLED_S:
            self.violated("a healthy scheduler is lost")

    def planned(self, engine: Engine, core: Scheduler, plan: StepPlan) -> None:
        """A sequence whose text has ended must not be computed further."""
        self.cache.planned(engine, plan)
        sinks = engine._dispatcher._sinks
        for active in core.state.requests.values():
            sink = sinks.get(active.request.request_id)
            for sequence in active.sequences:
                if not isinstance(sink, ResponseStream) or sequence.is_finished:
                    continue
                if sink._completions[sequence.index].has_stopped:
                    self.violated(f"{sequence!r} goes on after its stop string")

    # --- ends of calls --------------------------------------------------------------------------------------------

    def usage(self, call: Client, finished: Finished) -> None:
        if finished.usage.completion_tokens != len(call.token_ids.get(finished.index, [])):
            self.violated(f"{call.name} is charged for {finished.usage.completion_tokens} tokens, and received others")

    def call_ended(self, call: Client) -> None:
        if call.code is None:
            return self.violated(f"{call.name} ended without a status")
        self._check_output(call)
        if call.code is not Code.OK and not (excuse := self._excuse(call)):
            self.violated(f"{call.name} failed without a reason: {call.code.name}: {call.details}")
        elif call.code is not Code.OK:
            self._world.log(f"{call.name} may fail: {excuse}")
        return None

    def _check_output(self, call: Client) -> None:
        """The output is that of one model, all of it if the call ended well, or else its beginning."""
        problems = []
        for digest in dict.fromkeys(process.digest for _, process in self.processes):
            problem = self._difference(call, digest)
            if problem is None:
                return
            problems.append(problem)
        if problems:
            self.violated(f"{call.name}: {problems[0]}")

    def _difference(self, call: Client, digest: str) -> str | None:
        is_ok = call.code is Code.OK
        prompt_logprobs = call.asked.expected_prompt_logprobs(self._world.machine.vocab_size)
        if call.prompt_logprobs != (prompt_logprobs if is_ok else prompt_logprobs[: len(call.prompt_logprobs)]):
            return f"the prompt has {call.prompt_logprobs}, not {prompt_logprobs}"
        for index in range(call.asked.num_sequences) if is_ok else sorted(call.token_ids):
            right = call.asked.expected(index, digest, self._world.machine.vocab_size)
            token_ids, logprobs = call.token_ids.get(index, []), call.logprobs.get(index, [])
            text, number = call.texts.get(index, ""), len(call.token_ids.get(index, []))
            ending = f"{text!r} {call.reasons.get(index)} {call.scores.get(index)}"
            if is_ok or index in call.reasons:
                wrong = (token_ids, text, call.reasons.get(index)) != (right.token_ids, right.text, right.reason)
                if wrong or logprobs != right.logprobs or call.scores.get(index) != right.score:
                    return f"sequence {index} is {token_ids} {ending} {logprobs}, not {right}"
            elif token_ids != right.token_ids[:number] or not right.text.startswith(text):
                return f"sequence {index} begins {token_ids} {ending}, not {right}"
            elif logprobs != right.logprobs[:number]:
                return f"sequence {index} begins with {logprobs}, not {right}"
        return None

    def _excuse(self, call: Client) -> str:
        """Returns why a call may have ended with its status; nothing if it may not."""
        faults, began_s, ended_s = self._world.faults, call.began_s, call.ended_s or 0.0
        own = next((fired.place for fired in faults.fired if fired.who == call.name), "")
        timeout_s = call.asked.timeout_s
        match call.code:
            case Code.CANCELLED:
                return "its client left" * call.has_left
            case Code.DEADLINE_EXCEEDED:
                return "its time is over" * (timeout_s is not None and ended_s >= began_s + timeout_s - 1e-6)
            case Code.UNAVAILABLE:
                return self._excuse_of_absence(call, began_s, ended_s)
            case Code.FAILED_PRECONDITION:
                return "other weights" * self._saw_other_weights(began_s, ended_s)
            case Code.OUT_OF_RANGE:
                return "a pool was smaller" * self._was_too_large(call)
            case Code.RESOURCE_EXHAUSTED:
                stalled = call.longest_stall_s >= self._world.stalled_reader_timeout_s
                stalled |= self.has_stopped_schedulers  # its clients seem to stall when it goes on
                return "its client stalled" * stalled or "it would be late" * (timeout_s is not None)
            case Code.INTERNAL:
                if own:
                    return own
                if "not finite" in call.details:
                    return "spoilt" * (call.asked.number in faults.spoilt)
                if "other weights" in call.details:
                    return "other weights" * self._saw_other_weights(began_s, ended_s)
                return self._excuse_of_all(began_s, faults.failed_s.get(call.name, ended_s)) or self._excuse_of_losses(
                    call
                )
        return ""

    def _excuse_of_absence(self, call: Client, began_s: float, ended_s: float) -> str:
        """Only a client that does not resume may see that the server is absent, or one that has never seen it."""
        is_drained = any(since_s <= ended_s and began_s <= until_s for since_s, until_s in self.drains_s)
        is_lost = call.is_cut_off or any(began_s <= time_s <= ended_s for time_s in self._scheduler_losses_s)
        asked = call.asked
        if asked.resume_timeout_s and (asked.knows_server or asked.waits or call.num_calls > 1):
            return ""
        return "there is no core" * call.saw_no_core or "the server drains" * is_drained or "it is lost" * is_lost

    def _excuse_of_all(self, began_s: float, failed_s: float) -> str:
        late_s = self._world.step_timeout_s + SLACK_S
        for fired in self._world.faults.fired:
            if (
                SCOPES[fired.place] is ALL
                and began_s - late_s <= fired.time_s
                and 0 <= failed_s - fired.time_s <= late_s
            ):
                return fired.place
        return ""

    def _excuse_of_losses(self, call: Client) -> str:
        is_poison = call.asked.number == self._world.faults.poison
        num_losses = sum(
            call.began_s <= time_s <= (call.ended_s or 0.0) and (is_poison or not is_poisoned)
            for time_s, is_poisoned in self._losses
        )
        return f"{num_losses} executors were lost" * (num_losses > MAX_LOSSES)

    def _was_too_large(self, call: Client) -> bool:
        least = min(process.num_blocks for _, process in self.processes) - 1
        return call.asked.most_blocks(self._world.machine.block_size) > least

    def _saw_other_weights(self, began_s: float, ended_s: float) -> bool:
        digests = [(time_s, process.digest) for time_s, process in self.processes]
        return any(
            before != after and time_s <= ended_s for (_, before), (time_s, after) in itertools.pairwise(digests)
        )

    # --- the state as a whole -------------------------------------------------------------------------------------

    def check_readiness(self) -> None:
        """SERVING must not be reported for long while no executor can serve. Called at intervals."""
        world, process, scheduler = self._world, self._world.host.process, self._world.scheduler
        if scheduler is None or scheduler.is_stopped:
            self._could_serve_s = world.now_s
            return
        is_hung = process is not None and process.hung_until_s > world.now_s
        is_stalled = scheduler.wire.stalled_until_s > world.now_s or scheduler.wire.is_cut
        if process is not None and not is_hung and not is_stalled:
            self._could_serve_s = world.now_s
        bound_s = 3 * world.step_timeout_s + 2 * world.notice_s + SLACK_S
        if scheduler.engine.state is ServerState.SERVING and world.now_s > self._could_serve_s + bound_s:
            self.violated(f"readiness says SERVING for {world.now_s - self._could_serve_s:.1f} s without an executor")

    def engine_ended(self, error: BaseException | None) -> None:
        """The engine may give up only after several failures in a row."""
        num_failures = sum(SCOPES[fired.place] is ALL for fired in self._world.faults.fired)
        if num_failures < MAX_FAILURES:
            self.violated(f"the engine ended after {num_failures} failures: {error!r}")

    def check_idle(self, scheduler: SchedulerProcess) -> None:
        """Nothing is left of requests that have ended."""
        world, engine, intake = self._world, scheduler.engine, scheduler.intake
        core, queue = engine.core, scheduler.intake._write_queue
        if core is not None:
            check_invariants(core)
        used = [] if core is None else [block for block in core.state.cache.pool.ref_counts if block]
        could_not_forget = any(fired.place == "metrics: ended" for fired in world.faults.fired)
        left = {
            "requests in the core": core is not None and core.num_unfinished_requests,
            "blocks": len(used),
            "slots": core is not None and core.state.limits.max_num_seqs - core.state.batch.num_free_slots,
            "sinks": len(engine._dispatcher),
            "open streams": len(intake.open_streams),
            "client request ids": len(intake._client_request_ids),
            "measured requests": 0 if could_not_forget else len(scheduler.metrics._queued),
            "streams that write": queue._num_writing,
            "streams that wait to write": sum(not turn.done() for turn in queue._waiting),
            "turns of the executor's streams": max(0, len(world.streams_of_executor()) - 1),
        }
        for what, number in left.items():
            if number:
                self.violated(f"{number} {what} are left at the end")
        if not engine._idle.is_set():
            self.violated("the engine is not idle at the end")

    def check_tasks(self) -> None:
        """No task is left once everything has stopped."""
        left = sorted(task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task())
        if left:
            names = [name if not name.startswith("Task-") else "a task" for name in left]
            self.violated(f"tasks are left: {', '.join(names)}")
