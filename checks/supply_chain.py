"""What the images install: a bill of materials (CycloneDX), and an audit for known vulnerabilities.

    python -m checks.supply_chain        # or: make supply-check

Writes dist/sbom-NAME.json for each lock of deploy/locks. Exits with status 1 if a locked package has a known
vulnerability that is not in ACCEPTED. Without a network it says what it leaves out, and exits with status 0.
"""

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from deploy.lock import LOCKS, ROOT, wanted

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
        for name in wanted():
            print(_bill(tools, name), flush=True)
        are_affected = [_audit(tools, name) for name in wanted()]
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
    found = vulnerabilities(finished.stdout)
    if found is None:
        print(f"audit of {name}: left out, no answer from the vulnerability service: {_last_line(finished.stderr)}")
        return False
    print(f"audit of {name}: {', '.join(found) or 'no known vulnerability'}")
    return bool(found)


def vulnerabilities(report: str) -> list[str] | None:
    """Returns `package version: id` for each vulnerability in a report of pip-audit; None if it is no report."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return None
    return [
        f"{package['name']} {package.get('version', '')}: {each['id']}"
        for package in packages
        for each in package.get("vulns", ())
    ]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end within {_TIMEOUT_S:g} s")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")


if __name__ == "__main__":
    sys.exit(main())
