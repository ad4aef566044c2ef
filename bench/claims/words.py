"""Texts that the HTML report and docs/evidence.md share."""

from bench.claims.claim import Claim
from bench.claims.outcome import Results

INTRODUCTION = (
    "Each claim is quoted with its source, measured on this machine by `quire bench claims`, and judged. A claim that "
    "is not reproduced has the measured reason. The sources measured other models on other machines, so shares and "
    "ratios can be expected to be reproduced, but not absolute numbers."
)
QUICK_WARNING = (
    "This is a smoke run (--quick) with few requests and short measurements, to see that everything works. "
    "Its verdicts mean nothing."
)


def described_machine(results: Results) -> str:
    """Returns one line about the machine, the model, the versions and the flags."""
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    flags = "".join(f", --{name} {value}" for name, value in results.flags.items())
    minutes = sum(outcome.seconds for outcome in results.outcomes.values()) / 60
    return (
        f"{machine.get('device', 'unknown device')}, {machine.get('num_cpus', '?')} cores; "
        f"model {results.model}, seed {results.seed}{flags}; {versions}; measured in {minutes:.1f} minutes."
    )


def conditions_of(results: Results, claim: Claim) -> str:
    """Returns the conditions of a measurement; for a claim without results, a sentence that says so."""
    outcome = results.outcomes.get(claim.name)
    if outcome is None or outcome.data is None:
        return "none: nothing was measured."
    return f"{claim.conditions(outcome.data)} Measured on {outcome.date[:10]} in {outcome.seconds:.0f} s."
