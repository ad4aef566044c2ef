"""Checks that the load of each step, followed plan by plan, equals a count over all sequences."""

from collections import Counter

from scheduler.core import Request, Scheduler, SchedulerLimits, Sequence, SequenceParams, StepPlan, StepResult
from scheduler.core.inspect.step_load import LoadTracker, StepLoad
from scheduler.core.inspect.views import unfinished_sequences
from tests.support.core.simulation import Simulation


def counted(scheduler: Scheduler, before: set[Sequence]) -> StepLoad:
    """Returns the load of the newest plan by counting; `before` has the sequences that existed before it.

    Samples that this plan forks compute nothing in it.
    """
    step = scheduler.state.in_flight[-1]
    prefills = dict(step.prefills)
    decodes = [s for s in step.sampled if s in before and s not in prefills]
    decodes += [s for s in step.beams if s not in prefills]
    return StepLoad(
        num_decodes=len(decodes),
        num_decode_pairs=sum(s.num_planned_tokens for s in decodes),
        num_prefills=len(prefills),
        num_prefill_tokens=sum(prefills.values()),
        num_prefill_pairs=sum(
            sum(range(s.num_planned_tokens - n + 1, s.num_planned_tokens + 1)) for s, n in prefills.items()
        ),
        num_sampled=len(step.sampled),
        num_reported=sum(n for s, n in prefills.items() if s.params.num_prompt_logprobs),
    )


class FollowedSimulation(Simulation):
    """A simulation in which a LoadTracker follows every plan."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seen: Counter[str] = Counter()
        schedule, trackers = self.harness.schedule, dict[int, LoadTracker]()

        def followed() -> StepPlan | None:
            before = set(unfinished_sequences(self.harness.scheduler.state))
            plan = schedule()
            if plan is not None:
                load = trackers.setdefault(plan.epoch, LoadTracker()).follow(plan)
                assert load == counted(self.harness.scheduler, before)
                assert (load.num_decodes + load.num_prefills, load.num_tokens) == (plan.num_sequences, plan.num_tokens)
                self.seen.update(plans=1, forks=len(plan.forks), branches=len(plan.branches), epochs=plan.epoch > 1)
                self.seen["both"] += load.num_decodes > 0 and load.num_prefills > 0
            return plan

        self.harness.schedule = followed  # type: ignore[method-assign]


def test_loads_are_right_in_every_world() -> None:
    seen: Counter[str] = Counter()
    for seed in range(200):
        simulation = FollowedSimulation(seed)
        simulation.run()
        seen.update(simulation.seen)
    assert all(seen[name] > 20 for name in ("plans", "forks", "branches", "epochs", "both")), seen


def test_a_prompt_in_two_chunks_beside_a_decode_by_hand() -> None:
    core, tracker = Scheduler(SchedulerLimits(2, 4, 50), num_blocks=20, block_size=4), LoadTracker()
    core.executor_attached(1, 20)

    def step() -> StepLoad:
        plan = core.schedule()
        assert plan is not None
        core.commit(StepResult(1, plan.step_id, [0] * len(core.state.in_flight[-1].sampled)))
        return tracker.follow(plan)

    core.add(Request(1, [1, 2], SequenceParams(max_total_tokens=6)))
    # two tokens: the first attends to itself, the second to both
    assert step() == StepLoad(0, 0, 1, 2, 1 + 2, 1)
    core.add(Request(2, [3, 4, 5, 6, 7], SequenceParams(max_total_tokens=7)))
    # the third token of request 1 attends to 3; three of request 2, as the budget is 4
    assert step() == StepLoad(1, 3, 1, 3, 1 + 2 + 3, 1)
    # the other two attend to 4 and 5 tokens; both sequences sample
    assert step() == StepLoad(1, 4, 1, 2, 4 + 5, 2)
    # request 1 computes its fifth token, and has sampled its sixth; request 2 its sixth
    assert step() == StepLoad(2, 5 + 6, num_sampled=2)
    assert core.num_unfinished_requests == 0


def test_skipping_steps_equals_following_unchanged_plans() -> None:
    def decoding() -> tuple[Scheduler, LoadTracker]:
        core, tracker = Scheduler(SchedulerLimits(2, 8, 50), num_blocks=30, block_size=4), LoadTracker()
        core.executor_attached(1, 30)
        for request_id, num_tokens in ((1, 3), (2, 4)):
            core.add(Request(request_id, [request_id] * num_tokens, SequenceParams(max_total_tokens=40)))
        return core, tracker

    def run(core: Scheduler, tracker: LoadTracker, num_steps: int) -> StepLoad:
        for _ in range(num_steps):
            plan = core.schedule()
            assert plan is not None
            load = tracker.follow(plan)
            core.commit(StepResult(1, plan.step_id, [0] * load.num_sampled))
        return load

    core, tracker = decoding()
    run(core, tracker, 2)  # both decode now
    tracker.skip(10)
    other_core, other_tracker = decoding()
    last = run(other_core, other_tracker, 12)
    assert (tracker.num_decodes, tracker.num_decode_context) == (last.num_decodes, last.num_decode_pairs)
