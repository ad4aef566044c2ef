"""A scheduler core with several tenants, for tests of their shares."""

from scheduler.core import Request, Scheduler, SchedulerLimits, SequenceParams, StepResult, TenantTerms


def limits(max_num_seqs: int = 8, **values: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs, values.pop("max_num_batched_tokens", 64), values.pop("max_model_len", 400), **values
    )


def request(request_id: int, tenant: str, *, prompt: int = 4, output: int = 4, n: int = 1, **fields: int) -> Request:
    params = SequenceParams(max_total_tokens=prompt + output, num_prompt_logprobs=fields.pop("num_prompt_logprobs", 0))
    return Request(request_id, [1] * prompt, params, seeds=tuple(range(n)), tenant=tenant, **fields)


def scheduler_of(limits: SchedulerLimits, num_blocks: int = 10_000, **terms: TenantTerms) -> Scheduler:
    scheduler = Scheduler(
        limits, num_blocks=num_blocks, block_size=4, terms_of=lambda name: terms.get(name, TenantTerms())
    )
    scheduler.executor_attached(1, num_blocks)
    return scheduler


def step(scheduler: Scheduler) -> list[str]:
    """Does one step; returns the tenants of the sequences that got a token."""
    plan = scheduler.schedule()
    assert plan is not None
    num_sampled = len(scheduler.state.in_flight[-1].sampled)
    events = scheduler.commit(StepResult(plan.epoch, plan.step_id, [7] * num_sampled))
    return [sequence.request.tenant for sequence in events.sequences]


def admitted(scheduler: Scheduler) -> list[int]:
    scheduler.schedule()
    return [sequence.request.request_id for sequence, _ in scheduler.state.in_flight[-1].admitted]
