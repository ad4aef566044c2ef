"""What the HTML report and docs/evidence.md both say."""

from bench.claims.claim import Claim
from bench.claims.outcome import Results

INTRODUCTION = (
    "Each claim is quoted with its source, measured on this machine by `quire bench claims`, and judged: also where it "
    "is not reproduced, and then with the measured reason. The sources measured other models on other machines, so "
    "what can be expected to return are shares and ratios, not absolute numbers."
)
QUICK_WARNING = (
    "A smoke run (--quick): few requests and short measurements, to see that everything works. Its verdicts mean "
    "nothing."
)


def described_machine(results: Results) -> str:
    """A line: where, when, with what."""
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    minutes = sum(outcome.seconds for outcome in results.outcomes.values()) / 60
    return (
        f"{machine.get('device', 'unknown device')}, {machine.get('num_cpus', '?')} cores, {machine.get('date', '')}; "
        f"model {results.model}, seed {results.seed}; {versions}; measured in {minutes:.1f} minutes."
    )


def conditions_of(results: Results, claim: Claim) -> str:
    """Under which it was measured; of a claim without data, that there are none."""
    outcome = results.outcomes.get(claim.name)
    if outcome is None or outcome.data is None:
        return "none: nothing was measured."
    return f"{claim.conditions(outcome.data)} Measured in {outcome.seconds:.0f} s."
