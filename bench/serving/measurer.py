"""The measurer of serving: engines take turns of seconds on the same traces, under the same conditions.

The speed of a shared machine changes from minute to minute, so engines that are measured minutes apart cannot be
compared. Here all engines are up during the whole measurement. In each round, and for each number of clients, every
engine runs the same trace, one right after the other, while a peer that was started here is stopped and Quire has
nothing to do. The order of the engines is reversed from round to round. Each turn has its own trace, so that no run
finds its prompts cached.

The ratio of two engines at a number of clients is the median of the rounds' ratios.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench.profiles import PROFILES, Profile
from bench.report import RunSummary, summarize
from bench.serving.engines import Engine, Observed, all_stopped
from bench.trace import TraceRequest, TraceSettings, make_trace
from quire.block_map import ServerInfo

_MIN_REQUESTS = 12
_REQUESTS_PER_CLIENT = 4
_NUM_WARM_UP_REQUESTS = 2
_WARM_UP_TOKENS = 8
_WARM_UP_SEED = 500_000  # added to the seed of a trace; seeds of turns are next to each other, or a million apart


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The load that all engines get.

    concurrencies      numbers of clients, one run for each in every round
    num_requests       requests of each run; None: four for each client, at least twelve
    seed               seed of the traces
    num_shared_tokens  tokens that all prompts begin with
    lengths            lengths of prompts and outputs: a name of `bench.trace.LENGTHS`
    num_rounds         rounds of turns
    profiles           names of PROFILES to run, instead of the mixed trace with these numbers of clients
    """

    concurrencies: tuple[int, ...]
    num_requests: int | None = None
    seed: int = 7
    num_shared_tokens: int = 0
    lengths: str = "mixed"
    num_rounds: int = 1
    profiles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One trace that every engine runs, one right after the other."""

    round_index: int
    concurrency: int
    trace: TraceSettings
    profile: str = ""

    @property
    def label(self) -> int | str:
        """The name of the turn's load in reports: its profile, or its number of clients."""
        return self.profile or self.concurrency


@dataclass(frozen=True, slots=True)
class Run:
    """One engine's run of one turn."""

    turn: Turn
    summary: RunSummary
    observed: Observed


def plan_turns(settings: LoadSettings, info: ServerInfo) -> list[Turn]:
    """Returns all turns of all rounds and numbers of clients. Each turn draws its own trace."""
    turns = []
    for index in range(settings.num_rounds):
        of_round = replace(settings, seed=settings.seed + index)
        if not settings.profiles:
            turns += [Turn(index, each, trace_settings(of_round, info, each)) for each in settings.concurrencies]
        for name in settings.profiles:
            profile = PROFILES[name]
            turns.append(Turn(index, profile.num_clients, profile_trace_settings(profile, of_round, info), name))
    return turns


def profile_trace_settings(profile: Profile, settings: LoadSettings, info: ServerInfo) -> TraceSettings:
    """Returns the trace settings of one turn of a profile."""
    return replace(
        trace_settings(settings, info, profile.num_clients),
        num_requests=settings.num_requests or profile.num_requests,
        num_shared_tokens=profile.num_shared_tokens,
        lengths=profile.lengths,
        num_samples=profile.num_samples,
        temperature=profile.temperature,
        top_p=profile.top_p,
    )


def trace_settings(settings: LoadSettings, info: ServerInfo, concurrency: int) -> TraceSettings:
    """Returns the trace settings of one turn: no request in it is longer than the model or the pool can hold."""
    default_num = max(_MIN_REQUESTS, _REQUESTS_PER_CLIENT * concurrency)
    return TraceSettings(
        num_requests=settings.num_requests or default_num,
        vocab_size=info.vocab_size,
        max_model_len=min(info.max_model_len, info.num_blocks * info.block_size),
        seed=settings.seed * 1_000_003 + concurrency,
        num_shared_tokens=settings.num_shared_tokens,
        lengths=settings.lengths,
    )


def warm_up_trace(trace: TraceSettings) -> list[TraceRequest]:
    """Returns a few short requests: the first ones pay for compilation and for memory that is touched first.

    No run has their prompts. A peer would find them in its prefix cache.
    """
    other = replace(trace, num_requests=_NUM_WARM_UP_REQUESTS, seed=trace.seed + _WARM_UP_SEED)
    return shortened(make_trace(other), _WARM_UP_TOKENS)


def shortened(trace: Sequence[TraceRequest], max_tokens: int) -> list[TraceRequest]:
    """Returns the same prompts with at most `max_tokens` tokens of output each."""
    return [replace(request, max_tokens=min(request.max_tokens, max_tokens)) for request in trace]


async def measure(
    engines: Sequence[Engine],
    turns: Sequence[Turn],
    warm_up: Sequence[TraceRequest] = (),
    on_run: Callable[[Run], None] = lambda run: None,
) -> list[Run]:
    """Runs every turn through every engine, after `warm_up`, which is not counted. Raises LoadError and QuireError.

    on_run  called with each run when it has ended
    """
    if warm_up:
        for engine in engines:
            with all_stopped([other for other in engines if other is not engine]):
                await engine.run(warm_up, len(warm_up))
    runs = []
    for turn in turns:
        trace = make_trace(turn.trace)
        for engine in engines if turn.round_index % 2 == 0 else reversed(engines):
            with all_stopped([other for other in engines if other is not engine]):
                observed = await engine.run(trace, turn.concurrency)
            summary = summarize(engine.name, observed.load, observed.pool, observed.steps)
            runs.append(Run(turn, summary, observed))
            on_run(runs[-1])
    return runs


def ratios_by_round(runs: Sequence[Run]) -> dict[str, dict[int | str, list[float]]]:
    """Returns Quire's output tokens/s over the other engine's, by other engine, label and round that both ran."""
    rates = {
        (run.summary.engine, run.turn.label, run.turn.round_index): run.summary.output_tokens_per_s for run in runs
    }
    found: dict[str, dict[int | str, list[float]]] = {}
    for (engine, label, index), rate in rates.items():
        if engine != "quire" and (own := rates.get(("quire", label, index))) is not None:
            found.setdefault(engine, {}).setdefault(label, []).append(own / rate)
    return found


def ratios(runs: Sequence[Run]) -> dict[str, dict[int | str, float]]:
    """Returns the median ratio over the rounds, by other engine, and by number of clients or profile."""
    return {
        engine: {label: median(own) for label, own in by_label.items()}
        for engine, by_label in ratios_by_round(runs).items()
    }
