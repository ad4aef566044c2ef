"""Runs a script of events and records what the scheduler does: plans, results, block tables, the pool.

`golden/README.md` explains the format. Tokens are letters, so that a reader can follow each of them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from scheduler.core import (
    BATCHING,
    DEFAULT_TENANT,
    KV_ALLOCATIONS,
    POLICIES,
    BeamParams,
    Events,
    QuireError,
    SchedulerLimits,
    Sequence,
    StepCosts,
    StepPlan,
)
from scheduler.core.baselines.batching import batch_members
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import VOCAB_SIZE, make_request, to_text

EMPTY, UNKNOWN, TIMES = "·", "?", "\N{MULTIPLICATION SIGN}"


class Transcript:
    """One scheduler, created by `start`. `perform` runs a command line and returns its effects as text."""

    def __init__(self) -> None:
        self._harness: Harness | None = None
        self._commands: dict[str, Callable[[list[str], dict[str, str]], Iterable[str]]] = {
            "start": self._start,
            "add": self._add,
            "cancel": self._cancel,
            "stop": self._stop,
            "clock": self._clock,
            "costs": self._costs,
            "schedule": self._schedule,
            "commit": self._commit,
            "step": self._step,
            "defer": self._defer,
            "lose": self._lose,
            "attach": self._attach,
            "run": self._run,
        }

    def perform(self, line: str) -> str:
        """Performs a command. Raises KeyError for an unknown command or option; errors of the scheduler are output."""
        name, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        arguments = [word for word in words if "=" not in word]
        try:
            return "\n".join(self._commands[name](arguments, options))
        except QuireError as error:
            return f"{type(error).__name__}: {error}"

    @property
    def harness(self) -> Harness:
        if self._harness is None:
            raise KeyError("a transcript begins with `start`")
        return self._harness

    # --- commands ---------------------------------------------------------------------------------------------

    def _start(self, _: list[str], options: dict[str, str]) -> Iterator[str]:
        """Starts a scheduler and attaches an executor.

        start blocks= block_size= seqs= budget= [in_flight=1] [max_preemptions=3] [policy=fcfs] [max_len=1000]
              [batching=continuous] [timeout_s=] [memory=paged] [max_ahead=4096] [target_s=inf] [min_prompt=32]
        """
        num_usable_blocks, block_size = int(options.pop("blocks")), int(options.pop("block_size"))
        policy = POLICIES[options.pop("policy", "fcfs")]
        batching = BATCHING[options.pop("batching", "continuous")]
        batching = replace(batching, timeout_s=float(options.pop("timeout_s", batching.timeout_s)))
        kv_allocation = KV_ALLOCATIONS[options.pop("memory", "paged")]
        limits = SchedulerLimits(
            max_num_seqs=int(options.pop("seqs")),
            max_num_batched_tokens=int(options.pop("budget")),
            max_model_len=int(options.pop("max_len", "1000")),
            max_in_flight=int(options.pop("in_flight", "1")),
            max_preemptions=int(options.pop("max_preemptions", "3")),
            max_ahead=int(options.pop("max_ahead", "4096")),
            target_inter_token_latency_s=float(options.pop("target_s", "inf")),
            min_prompt_tokens=int(options.pop("min_prompt", "32")),
        )
        _refuse_leftovers(options)
        self._harness = Harness(
            limits,
            num_blocks=num_usable_blocks + 1,
            block_size=block_size,
            policy=policy,
            batching=batching,
            kv_allocation=kv_allocation,
            vocab_size=VOCAB_SIZE,
        )
        self._harness.attach()
        yield from self._state()

    def _add(self, arguments: list[str], options: dict[str, str]) -> Iterator[str]:
        """Adds a request.

        add ID prompt= max_tokens= [seeds=0,1] [eos=] [priority=] [salt=] [deadline_s=] [beams=WIDTH] [tenant=]
        """
        width = int(options.pop("beams", "0"))
        deadline_s = options.pop("deadline_s", None)
        request = make_request(
            int(arguments[0]),
            options.pop("prompt"),
            int(options.pop("max_tokens")),
            seeds=[int(seed) for seed in options.pop("seeds", "0").split(",")],
            eos=options.pop("eos", ""),
            priority=int(options.pop("priority", "0")),
            salt=options.pop("salt", "").encode(),
            deadline_s=None if deadline_s is None else float(deadline_s),
            beam=BeamParams(width, width) if width else None,
            tenant=options.pop("tenant", DEFAULT_TENANT),
        )
        _refuse_leftovers(options)
        self.harness.add(request)
        yield from self._state()

    def _cancel(self, arguments: list[str], _: dict[str, str]) -> Iterator[str]:
        self.harness.cancel(int(arguments[0]))
        yield from self._state()

    def _stop(self, arguments: list[str], _: dict[str, str]) -> Iterator[str]:
        request_id, index = arguments[0].split(".")
        yield from _event_lines(self.harness.stop(int(request_id), int(index)))
        yield from self._state()

    def _clock(self, arguments: list[str], _: dict[str, str]) -> Iterator[str]:
        yield from _event_lines(self.harness.expire(float(arguments[0])))
        yield from self._state()

    def _costs(self, _: list[str], options: dict[str, str]) -> Iterator[str]:
        """Sets what steps cost, in seconds: costs [step_s=0] [decode_s=0] [token_s=0] …"""
        self.harness.scheduler.set_costs(StepCosts(**{name: float(value) for name, value in options.items()}))
        yield from self._state()

    def _defer(self, arguments: list[str], _: dict[str, str]) -> Iterator[str]:
        """Lets the executor not wait for the next tokens of some slots: defer NUMBER."""
        self.harness.defer(int(arguments[0]))
        yield from self._state()

    def _schedule(self, _: list[str], __: dict[str, str]) -> Iterator[str]:
        plan = self.harness.schedule()
        yield from ["no plan"] if plan is None else _plan_lines(plan)
        yield from self._state()

    def _commit(self, _: list[str], __: dict[str, str]) -> Iterator[str]:
        yield f"result {self.harness.in_flight[0].plan.step_id}"
        yield from _event_lines(self.harness.commit())
        yield from self._state()

    def _step(self, arguments: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._schedule(arguments, options)
        yield from self._commit(arguments, options)

    def _lose(self, _: list[str], __: dict[str, str]) -> Iterator[str]:
        yield from _event_lines(self.harness.lose())
        yield from self._state()

    def _attach(self, arguments: list[str], _: dict[str, str]) -> Iterator[str]:
        """Attaches an executor: attach [BLOCKS]."""
        yield from _event_lines(self.harness.attach(int(arguments[0]) + 1 if arguments else None))
        yield f"epoch {self.harness.scheduler.state.epoch}"
        yield from self._state()

    def _run(self, _: list[str], __: dict[str, str]) -> Iterator[str]:
        """Runs to the end and records only the outcome."""
        num_steps = self.harness.scheduler.state.counters.num_steps
        self.harness.run()
        yield f"{self.harness.scheduler.state.counters.num_steps - num_steps} more plans"
        clients = self.harness.clients
        for (request_id, index), token_ids in clients.received.items():
            reason = clients.ended[request_id, index].value
            found = " ".join(to_text(result.token_ids) for result in clients.beams.get(request_id, []))
            yield f"  {request_id}.{index} got {to_text(token_ids) or found or 'nothing'}, {reason}"
        yield from self._state()

    # --- pictures ---------------------------------------------------------------------------------------------

    def _state(self) -> Iterator[str]:
        scheduler = self.harness.scheduler
        if members := batch_members(scheduler.state):
            yield f"batch    {_spaced(members)}"
        if scheduler.num_waiting:
            yield f"queue    {_spaced(map(_name, scheduler.state.waiting))}"
        if scheduler.state.waiting.paused:
            yield f"paused   {_spaced(map(_name, scheduler.state.waiting.paused))}"
        if len(accounts := scheduler.state.accounts.active) > 1:
            yield f"service  {_spaced(f'{account.name} {account.level:g}' for account in accounts)}"
        for sequence in scheduler.state.batch.running:
            seat = "leaving" if sequence.slot < 0 else f"slot {sequence.slot}"
            yield f"{_name(sequence):8} {seat:8} {self._draw_tokens(sequence)}"
        if self.harness.in_flight and scheduler.state.limits.max_in_flight > 1:
            yield f"plans    {_spaced(flight.plan.step_id for flight in self.harness.in_flight)} in flight"
        yield f"pool     {self._draw_pool()}"

    def _draw_tokens(self, sequence: Sequence) -> str:
        """Draws the blocks: capitals are computed, small letters are being computed; unplanned tokens follow."""
        size = self.harness.scheduler.state.cache.block_size
        known = to_text(sequence.token_ids)
        planned = known[: sequence.num_planned_tokens].ljust(sequence.num_planned_tokens, UNKNOWN)
        num_computed = sequence.num_computed_tokens
        token_slots = planned[:num_computed].upper() + planned[num_computed:]
        blocks = [
            f"{block}[{token_slots[i * size : (i + 1) * size].ljust(size, EMPTY)}]"
            for i, block in enumerate(sequence.block_table)
        ]
        rest = known[sequence.num_planned_tokens :]
        return " ".join([*blocks, f"+ {rest}"] if rest else blocks)

    def _draw_pool(self) -> str:
        scheduler = self.harness.scheduler
        pool, index = scheduler.state.cache.pool, scheduler.state.cache.index
        in_tables = {block for sequence in scheduler.state.batch.running for block in sequence.block_table}
        in_use = [block for block, num_refs in enumerate(pool.ref_counts) if num_refs]
        parts = {
            "in use": [f"{block}{TIMES}{pool.ref_counts[block]}".removesuffix(f"{TIMES}1") for block in in_use],
            "of these only by plans in flight": [str(block) for block in in_use if block not in in_tables],
            "free": [str(block) for block in pool.free_blocks() if block not in index],
            "cached": [str(block) for block in pool.free_blocks() if block in index],
        }
        return ", ".join(f"{name} {_spaced(blocks)}" for name, blocks in parts.items() if blocks)


def _plan_lines(plan: StepPlan) -> Iterator[str]:
    """Yields the parts of a plan in the order in which the executor applies them."""
    yield f"plan {plan.step_id}: {_count(plan.num_tokens, 'token')} of {_count(plan.num_sequences, 'sequence')}"
    for slot in plan.retired_slots:
        yield f"  retire   slot {slot}"
    for admission in plan.admissions:
        blocks = _spaced(admission.block_table)
        cached = f", {admission.num_computed_tokens} computed" if admission.num_computed_tokens else ""
        yield f"  admit    slot {admission.slot} ← {to_text(admission.token_ids)}{cached}, blocks {blocks}"
    for slot, parent, token_id in _tuples(plan.branches, 3):
        yield f"  branch   slot {slot} ← slot {parent} + {to_text([token_id])}"
    for slot, logical, physical in _tuples(plan.table_updates, 3):
        yield f"  table    slot {slot}, block {logical} ← {physical}"
    for source, destination in _tuples(plan.block_copies, 2):
        yield f"  copy     {source} → {destination}"
    for slot, num_tokens in _tuples(plan.row_counts, 2):
        yield f"  rows     slot {slot} computes {num_tokens} a step"
    for fork in plan.forks:
        yield f"  fork     slot {fork.parent_slot} → slot {fork.child_slot}, seed {fork.seed}"


def _event_lines(events: Events) -> Iterator[str]:
    for sequence in events.started:
        yield f"  {_name(sequence)} starts, {sequence.num_cached_tokens} of {sequence.num_prompt_tokens} tokens cached"
    for sequence, token_id in zip(events.sequences, events.token_ids, strict=True):
        yield f"  {_name(sequence)} gets {to_text([token_id])}"
    for sequence, results in events.beams:
        for result in results:
            text, reason = to_text(result.token_ids), result.reason.value
            yield f"  {_name(sequence)} found {text}, score {result.score:.3f}: {reason}"
    for sequence, reason in events.finished:
        yield f"  {_name(sequence)} ends: {reason.value}"


def _name(sequence: Sequence) -> str:
    return f"{sequence.request.request_id}.{sequence.index}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _spaced(things: Iterable[object]) -> str:
    return " ".join(map(str, things))


def _tuples(flat: list[int], width: int) -> list[tuple[int, ...]]:
    return [tuple(flat[i : i + width]) for i in range(0, len(flat), width)]


def _refuse_leftovers(options: dict[str, str]) -> None:
    if options:
        raise KeyError(f"unknown options {sorted(options)}")
