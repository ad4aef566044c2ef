"""Lists the components of the images as bills of materials (CycloneDX), and audits them for known vulnerabilities.

    python -m checks.supply_chain        # or: make supply-check

Writes dist/sbom-NAME.json for each lock of deploy/locks. Exits with status 1 if a locked package has a known
vulnerability that is not in ACCEPTED. Without a network it says what it leaves out, and exits with status 0.
"""

import json
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

from deploy.lock import LOCKS, ROOT, lock_names

TOOLS = ("cyclonedx-bom==7.5.0", "pip-audit==2.10.1")
ACCEPTED: dict[str, str] = {}
"""Known vulnerabilities that do not concern Quire, by id, each with the reason."""

_TIMEOUT_S = 180.0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="quire-supply-") as folder:
        tools = Path(folder) / "bin"
        venv.create(folder, with_pip=True)
        installed = _run(str(tools / "pip"), "install", "--quiet", "--disable-pip-version-check", *TOOLS)
        if installed.returncode:
            print(f"supply chain: left out, because its tools cannot be installed: {_last_line(installed.stderr)}")
            return 0
        for name in lock_names():
            print(_bill(tools, name), flush=True)
        are_affected = [_audit(tools, name) for name in lock_names()]
        return int(any(are_affected))


def _bill(tools: Path, name: str) -> str:
    """Writes the bill of materials of a lock. Raises CalledProcessError."""
    target = ROOT / "dist" / f"sbom-{name}.json"
    target.parent.mkdir(exist_ok=True)
    command = (str(tools / "cyclonedx-py"), "requirements", str(LOCKS / f"{name}.txt"), "--output-reproducible")
    _run(*command, "--of", "JSON", "-o", str(target)).check_returncode()
    components = json.loads(target.read_text(encoding="utf-8"))["components"]
    return f"{target.relative_to(ROOT)}: {len(components)} components"


def _audit(tools: Path, name: str) -> bool:
    """Prints the outcome of the audit of a lock. Returns True if there are vulnerabilities that are not accepted."""
    accepted = [word for each in ACCEPTED for word in ("--ignore-vuln", each)]
    command = (str(tools / "pip-audit"), "--require-hashes", "--disable-pip", "--progress-spinner", "off", "-f", "json")
    finished = _run(*command, "-r", str(LOCKS / f"{name}.txt"), *accepted)
    audit = read_audit(finished.stdout)
    if not audit.num_audited:
        print(f"audit of {name}: left out, no answer from the vulnerability service. {_last_line(finished.stderr)}")
    else:
        found = ", ".join(audit.vulnerabilities) or "no known vulnerability"
        print(f"audit of {name}: {found} in {audit.num_audited} packages; {audit.num_unknown} are not known there")
    return bool(audit.vulnerabilities)


@dataclass(frozen=True, slots=True)
class Audit:
    """The outcome of an audit. vulnerabilities: `package version: id`. num_unknown: packages without an answer."""

    num_audited: int = 0
    num_unknown: int = 0
    vulnerabilities: tuple[str, ...] = ()


def read_audit(report: str) -> Audit:
    """Reads a report of pip-audit. What is no report counts as one without packages."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return Audit()
    # pip-audit reports "no known vulnerabilities" also for packages for which it got no answer.
    audited = [package for package in packages if "skip_reason" not in package]
    found = [
        f"{package['name']} {package['version']}: {each['id']}" for package in audited for each in package["vulns"]
    ]
    return Audit(len(audited), len(packages) - len(audited), tuple(found))


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end within {_TIMEOUT_S:g} s")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")


if __name__ == "__main__":
    sys.exit(main())
