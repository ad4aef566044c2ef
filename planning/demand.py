"""The requests that the settings describe: their sources, and the end of the simulation."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path

from planning.arrivals import MAX_NUMBER, Arrivals, Bursts, ClosedLoop, Diurnal, Poisson
from planning.errors import PlanningError
from planning.lengths import LENGTHS, MAX_TOKENS, FixedLengths, LengthSource
from planning.request_factory import MAX_SYSTEM_PROMPTS
from planning.request_file import read_jobs, read_tenants
from planning.settings import SimulateSettings
from planning.simulation import Horizon
from planning.workload import JobSource, ListedJobs, Source, Tenant
from scheduler.core import TenantTerms

_DEFAULT_NUM_REQUESTS = 1000
_LEAST = 1e-6
_MAX_CLIENTS = 1_000_000  # each begins with a request
_OF_RATES = ("burstiness", "daily_swing")
_OF_CLIENTS = ("turnaround_s",)
_OF_DRAWN_REQUESTS = (
    "prompt_tokens",
    "output_tokens",
    "system_tokens",
    "system_share",
    "system_prompts",
    "system_skew",
)


@dataclass(frozen=True, slots=True)
class Demand:
    """Sources of requests, one for each of the names.

    is_closed_loop  some requests arrive because others have ended
    terms           terms of the tenants, one for each source; empty: all requests are of one tenant
    """

    names: list[str]
    sources: list[JobSource]
    horizon: Horizon
    has_shared_prefixes: bool
    is_closed_loop: bool
    terms: tuple[TenantTerms, ...] = ()


def find_demand(settings: SimulateSettings, max_model_len: int) -> Demand:
    """Returns the sources and the end of the simulation that the settings describe. Raises PlanningError."""
    for name in ("num_requests", "duration_s"):
        if (value := getattr(settings, name)) is not None and not 0 < value <= MAX_NUMBER:
            raise PlanningError(f"{name}: must be above 0 and at most {MAX_NUMBER:g}, not {value}")
    if settings.num_requests is None and settings.duration_s is None:
        horizon = Horizon(num_requests=_DEFAULT_NUM_REQUESTS)
    else:
        horizon = Horizon(settings.num_requests, settings.duration_s)
    if settings.lengths not in (*LENGTHS, "fixed") and settings.tenants is None:
        return _listed(settings, horizon)
    if settings.tenants is None:
        tenants = [_tenant("requests", TenantTerms(), settings, max_model_len)]
    else:
        tenants = [_tenant(*parts, max_model_len) for parts in read_tenants(Path(settings.tenants), settings)]
    return Demand(
        [tenant.name for tenant in tenants],
        [Source(i, tenant, max_model_len, settings.seed) for i, tenant in enumerate(tenants)],
        horizon,
        any(tenant.num_system_tokens for tenant in tenants),
        any(isinstance(tenant.arrivals, ClosedLoop) for tenant in tenants),
        () if settings.tenants is None else tuple(tenant.terms for tenant in tenants),
    )


def _listed(settings: SimulateSettings, horizon: Horizon) -> Demand:
    """Returns the demand of a file of requests.

    They arrive at their own times; without times at those of `rate`, or all at once. `clients` send them in their order
    as a closed loop. Raises PlanningError for settings that the file leaves no use for.
    """
    jobs, have_times = read_jobs(Path(settings.lengths))
    if settings.rate is not None and have_times:
        raise PlanningError(f"rate: the requests in {settings.lengths} have times of their own (arrival_s)")
    refuse(settings, _OF_DRAWN_REQUESTS, "has no effect with lengths from a file")
    if settings.rate is None:
        refuse(settings, _OF_RATES, "requires a rate")
    if settings.clients is None:
        refuse(settings, _OF_CLIENTS, "requires clients")
    if settings.num_requests is None and settings.duration_s is None:
        horizon = Horizon(num_requests=len(jobs))
        settings = replace(settings, num_requests=len(jobs))
    loop = None
    if settings.rate is not None or settings.clients is not None:
        arrivals = _arrivals(settings)
        if isinstance(arrivals, ClosedLoop):
            loop = arrivals
        else:
            times_s = arrivals.times_s(random.Random(f"{settings.seed} arrivals 0"))
            jobs = [replace(job, arrival_s=time_s) for job, time_s in zip(jobs, times_s, strict=False)]
    return Demand(["requests"], [ListedJobs(jobs, loop)], horizon, False, loop is not None)


def refuse(settings: SimulateSettings, names: Iterable[str], reason: str) -> None:
    """Raises PlanningError if one of these settings has another value than its default; `reason` follows its name."""
    defaults = {field.name: field.default for field in fields(settings)}
    for name in names:
        if getattr(settings, name) != defaults[name]:
            raise PlanningError(f"{name}: {reason}")


def _tenant(name: str, terms: TenantTerms, settings: SimulateSettings, max_model_len: int) -> Tenant:
    if not 0 <= settings.system_tokens <= max_model_len // 2 or not 0 <= settings.system_share <= 1:
        raise PlanningError("system_tokens: from 0 to half of max_model_len; system_share: from 0 to 1")
    if (
        type(settings.system_prompts) is not int
        or not 1 <= settings.system_prompts <= MAX_SYSTEM_PROMPTS
        or not 0 <= settings.system_skew < inf
    ):
        raise PlanningError(f"system_prompts: from 1 to {MAX_SYSTEM_PROMPTS}; system_skew: must not be negative")
    return Tenant(
        name,
        _arrivals(settings),
        _lengths(settings),
        terms,
        settings.system_tokens,
        settings.system_share,
        settings.system_prompts,
        settings.system_skew,
    )


def _lengths(settings: SimulateSettings) -> LengthSource:
    if settings.lengths in LENGTHS:
        return LENGTHS[settings.lengths]
    if settings.lengths != "fixed":
        raise PlanningError(f"lengths: {settings.lengths!r} of a tenant must be one of {', '.join(LENGTHS)}, fixed")
    if (
        not settings.prompt_tokens
        or not settings.output_tokens
        or min(settings.prompt_tokens, settings.output_tokens) < 1
    ):
        raise PlanningError("lengths fixed: requires prompt_tokens and output_tokens, both at least 1")
    if max(settings.prompt_tokens, settings.output_tokens) > MAX_TOKENS:
        raise PlanningError(f"prompt_tokens, output_tokens: at most {MAX_TOKENS:,}")
    return FixedLengths(settings.prompt_tokens, settings.output_tokens)


def _arrivals(settings: SimulateSettings) -> Arrivals:
    rate, clients = settings.rate, settings.clients
    if (rate is None) == (clients is None):
        raise PlanningError("give either clients (a closed loop) or rate (an open one)")
    if clients is not None:
        if not 1 <= clients <= _MAX_CLIENTS or not 0 <= settings.turnaround_s <= MAX_NUMBER:
            raise PlanningError(f"clients: from 1 to {_MAX_CLIENTS:,}; turnaround_s: from 0 to {MAX_NUMBER:g}")
        if settings.num_requests is None and settings.duration_s is None and clients > _DEFAULT_NUM_REQUESTS:
            raise PlanningError(f"clients: {clients} clients require num_requests or duration_s")
        return ClosedLoop(clients, settings.turnaround_s)
    if rate is None or not (_LEAST <= rate <= MAX_NUMBER and _LEAST <= settings.burstiness <= MAX_NUMBER):
        raise PlanningError(f"rate and burstiness: from {_LEAST:g} to {MAX_NUMBER:g}")
    if not 0 <= settings.daily_swing <= 1:
        raise PlanningError("daily_swing: from 0 to 1")
    if settings.daily_swing and settings.burstiness != 1:
        raise PlanningError("burstiness and daily_swing cannot both be given")
    if settings.daily_swing:
        return Diurnal(rate, settings.daily_swing)
    return Poisson(rate) if settings.burstiness == 1 else Bursts(rate, settings.burstiness)
