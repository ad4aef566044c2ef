"""Predicts when a request would end, so that one that cannot meet its deadline is refused at once.

service per second                   computed prompt tokens, and generated tokens twice, divided by the seconds in which
                                     sequences waited: without a queue, a server serves less than it could. A prompt of
                                     many steps counts as it is computed
step time                            measured then, too, while sequences decode: a step that computes only a long prompt
                                     may take as long as ten with decodes
prompt of a request                  the part of it that is computed, by the average of those that started: the rest was
                                     cached
output of a request                  the average of the sequences that ended, times the average of results of a request:
                                     samples wait as one sequence
wait                                 the service queued before the request, divided by the rate

The machine may become slower while an accepted request waits. The core is therefore told how long sequences run, and
ends requests that start too late: steps for a request that does not end in time are lost to the others.
"""

from collections.abc import Iterable

from scheduler.core import Events, FinishReason, QueueFull, RunTime, Scheduler, oldest_waiting_s
from scheduler.core.inspect.views import num_waiting_sequences
from scheduler.core.tenants.account import GENERATED_TOKEN_COST, PROMPT_TOKEN_COST, Account

HALF_LIFE_S = 2.0
"""Time under load after which a measurement counts half."""

MIN_MEASURED_S = 1.0
"""Time under load that has to be measured before a request is refused."""

OUTPUT_GAIN = 0.05
"""Part of the average output that the last request that ended determines."""

START_GAIN = 0.05
"""Part of the averages of computed prompt tokens and of results that the last request that started determines."""

MARGIN = 1.4
"""Factor on predicted times: under overload each accepted request is close to its limit, so half would be late."""

RUN_TIME_MARGIN = 1.2
"""Factor on the step time, by which later steps may be slower."""

MAX_WAIT_S = 3600.0
"""Longest time that is predicted. When an executor gives no result for a minute, the measured rate is close to zero."""

OLDEST_INTERVAL_S = 0.25
"""Least time between two looks at the whole queue for its oldest sequence, for which many clients may ask."""

_CUT_OFF = (FinishReason.DEADLINE, FinishReason.CANCELLED)


class WaitPrediction:
    """Measures the service of one core, and the age of its queue.

    It predicts no wait without measurements under load, or with an empty queue.
    """

    def __init__(self) -> None:
        self._service = 0.0
        self._busy_s = 0.0
        self._num_steps = 0.0  # with decodes
        self._steps_s = 0.0
        self._num_output_tokens: float | None = None
        # Of requests that started; later ones count more.
        self._num_started = self._num_results = self._num_given_tokens = self._num_computed_tokens = 0.0
        # time, service, steps and whether sequences decoded, when sequences waited last
        self._last: tuple[float, int, int, bool] | None = None
        self._oldest_queued_s = self._next_look_s = 0.0

    def oldest_s(self, core: Scheduler, now_s: float) -> float:
        """Returns the seconds that the oldest waiting sequence has waited, as of the last look; 0 without one."""
        if not num_waiting_sequences(core):
            self._next_look_s = 0.0
            return 0.0
        if now_s >= self._next_look_s:
            self._oldest_queued_s = now_s - oldest_waiting_s(core, now_s)
            self._next_look_s = now_s + OLDEST_INTERVAL_S
        return now_s - self._oldest_queued_s

    def committed(self, core: Scheduler, events: Events, now_s: float) -> None:
        """Measures after each commit, and tells the core how long sequences run."""
        self._average(events)
        if not core.is_attached:  # nothing is served now, and the next executor may be slower or faster
            self._service = self._num_steps = self._busy_s = self._steps_s = 0.0
            self._last = None
            return
        service, num_steps = _total_service(core), core.state.counters.num_steps
        if self._last is not None and now_s > self._last[0]:
            last_s, last_service, last_steps, has_decoded = self._last
            decay = 0.5 ** ((now_s - last_s) / HALF_LIFE_S)
            self._busy_s = decay * self._busy_s + (now_s - last_s)
            self._service = decay * self._service + (service - last_service)
            if has_decoded:
                self._steps_s = decay * self._steps_s + (now_s - last_s)
                self._num_steps = decay * self._num_steps + (num_steps - last_steps)
        has_decodes = bool(core.state.batch.decoding)
        self._last = (now_s, service, num_steps, has_decodes) if core.num_waiting else None
        core.set_run_time(self._run_time(RUN_TIME_MARGIN))

    def _average(self, events: Events) -> None:
        """Averages the prompts and results of requests that started, and the outputs of sequences that ended."""
        for sequence in events.started:
            num_results = 1 if sequence.request.outputs else sequence.request.num_results
            self._num_started += 1 - START_GAIN * self._num_started
            self._num_results += num_results - START_GAIN * self._num_results
            num_given = sequence.num_given_tokens
            num_computed = num_given - (sequence.num_cached_tokens or 0)
            self._num_given_tokens += num_given - START_GAIN * self._num_given_tokens
            self._num_computed_tokens += num_computed - START_GAIN * self._num_computed_tokens
        outputs = [(sequence.num_tokens - sequence.num_prompt_tokens, reason) for sequence, reason in events.finished]
        outputs += [(len(result.token_ids), result.reason) for _, results in events.beams for result in results]
        for num_tokens, reason in outputs:
            if num_tokens:
                known = num_tokens if self._num_output_tokens is None else self._num_output_tokens
                if num_tokens > known or reason not in _CUT_OFF:  # an output that was cut off would have been longer
                    self._num_output_tokens = known + OUTPUT_GAIN * (num_tokens - known)
                else:
                    self._num_output_tokens = known

    def _run_time(self, margin: float = 1.0) -> RunTime:
        if self._num_output_tokens is None or not self._num_steps:
            return RunTime()
        return RunTime(margin * self._steps_s / max(1.0, self._num_steps), self._num_output_tokens)

    def predicted_s(self, core: Scheduler, tenant: str, max_tokens: float, priority: int = 0) -> float:
        """Returns the time until a request of up to `max_tokens` would end; 0 if nothing is known or nothing waits.

        It waits for the queues of tenants of lower priority numbers. Then it waits for the requests of its own tenant
        that come before it, at the tenant's share of the service, or together with the queues of all tenants of the
        same priority if that is shorter. `priority` is its place among the requests of its tenant.
        """
        output, waiting, accounts = self._num_output_tokens, core.state.waiting, core.state.accounts
        if output is None or not core.num_waiting or self._busy_s < MIN_MEASURED_S or self._service <= 0:
            return 0.0
        account = accounts.of(tenant)
        others = {other for other in accounts.active if other is not account and len(waiting.of(other))}
        peers = {other for other in others if other.terms.priority == account.terms.priority}
        share = account.terms.weight / (account.terms.weight + sum(other.terms.weight for other in peers))
        computed_share = self._num_computed_tokens / max(1.0, self._num_given_tokens)
        outputs = output * self._num_results / max(1.0, self._num_started)

        def service(num_entries: int, num_prompt_tokens: int) -> float:
            return PROMPT_TOKEN_COST * computed_share * num_prompt_tokens + GENERATED_TOKEN_COST * outputs * num_entries

        def service_of(tenants: Iterable[Account]) -> float:
            queues = [waiting.of(each) for each in tenants]
            return sum(service(len(queue), queue.num_prompt_tokens) for queue in queues)

        before = service_of(other for other in others if other.terms.priority < account.terms.priority)
        own = service(*waiting.of(account).before(priority))
        wait_s = (before + min(own / share, own + service_of(peers))) * self._busy_s / self._service
        return min(MAX_WAIT_S, wait_s + self._run_time().run_s(max_tokens))

    def check(
        self,
        core: Scheduler,
        tenant: str,
        deadline_s: float | None,
        max_tokens: float,
        now_s: float,
        priority: int = 0,
    ) -> None:
        """Raises QueueFull, with the time after which it may fit, if a request would miss its deadline."""
        if deadline_s is None:
            return
        late_s = now_s + MARGIN * self.predicted_s(core, tenant, max_tokens, priority) - deadline_s
        if late_s > 0 and core.num_waiting:
            raise QueueFull("the request would miss its deadline: it would wait for too long", late_s)


def _total_service(core: Scheduler) -> int:
    counters = core.state.counters
    return PROMPT_TOKEN_COST * counters.num_prefilled_tokens + GENERATED_TOKEN_COST * counters.num_generated_tokens
