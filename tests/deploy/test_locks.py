"""The locks of the images hold every package with hashes, in the versions that the tests run with."""

import json
import re
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from checks.supply_chain import Audit, read_audit
from deploy.lock import LOCKS, ROOT, entries, is_unlocked, render, wanted

CONSTRAINTS = {
    canonicalize_name(line.split("==")[0]): line.split("==")[1].strip()
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if re.match(r"[\w.-]+==", line)
}
locks = pytest.mark.parametrize("name", wanted())


def pins(name: str) -> dict[str, list[str]]:
    return entries((LOCKS / f"{name}.txt").read_text(encoding="utf-8"))


def locked(name: str) -> dict[str, str]:
    return {canonicalize_name(pin.split("==")[0]): pin.split("==")[1] for pin in pins(name)}


@locks
def test_every_package_has_hashes(name: str) -> None:
    assert pins(name)
    for pin, hashes in pins(name).items():
        assert hashes, pin
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), pin


@locks
def test_a_lock_has_nothing_but_packages(name: str) -> None:
    """An option such as an index or a folder would be that of the machine on which the lock was made."""
    for line in (LOCKS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(r"#.*|[a-z0-9._-]+==\S+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line


@locks
def test_versions_are_those_of_the_tests(name: str) -> None:
    found = locked(name)
    assert {
        package: version for package, version in found.items() if CONSTRAINTS.get(package, version) != version
    } == {}


@locks
def test_every_requirement_is_locked_with_what_it_requires(name: str) -> None:
    found, missing = locked(name), set()
    waiting = [(Requirement(text), {""}) for text in wanted()[name]]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extras = waiting.pop()
        package = canonicalize_name(requirement.name)
        marker = requirement.marker
        if (package, str(requirement.extras)) in seen or (
            marker and not any(marker.evaluate({"extra": extra}) for extra in extras)
        ):
            continue
        seen.add((package, str(requirement.extras)))
        if package not in found and not is_unlocked(package):
            missing.add(package)
        try:
            waiting += [(Requirement(text), {"", *requirement.extras}) for text in requires(package) or ()]
        except PackageNotFoundError:
            continue
    assert missing == set()


def test_a_lock_is_rendered_without_options_and_without_torch() -> None:
    made = "--find-links /wheels\n\n"
    made += "b==2 \\\n    --hash=sha256:bb\ntorch==2 \\\n    --hash=sha256:cc\nnvidia-x==1\na==1 \\\n"
    made += "    --hash=sha256:aa \\\n    --hash=sha256:ab\n    # via b\n"
    rendered = render(made)
    assert entries(rendered) == {"a==1": ["--hash=sha256:aa", "--hash=sha256:ab"], "b==2": ["--hash=sha256:bb"]}
    assert "wheels" not in rendered
    assert render(rendered) == rendered


def test_the_images_install_nothing_without_a_hash_but_torch() -> None:
    for name in ("scheduler", "executor"):
        text = (ROOT / "deploy" / f"{name}.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
        for command in re.findall(r"bin/pip install [^&\n]*", text):
            is_free = "--constraint constraints.txt torch" in command or "--no-deps dist/*.whl" in command
            assert is_free or "--require-hashes" in command, command


@pytest.mark.parametrize("report", ["", "[]", "no network", "{}"])
def test_what_is_no_report_of_the_audit_is_not_taken_for_one(report: str) -> None:
    assert read_audit(report) == Audit()


def test_a_package_without_an_answer_was_not_audited() -> None:
    vulnerable = {"name": "a", "version": "1", "vulns": [{"id": "X-1"}]}
    sound, unknown = {"name": "b", "version": "2", "vulns": []}, {"name": "c", "skip_reason": "not found"}
    report = json.dumps({"dependencies": [vulnerable, sound, unknown, unknown]})
    assert read_audit(report) == Audit(2, 2, ("a 1: X-1",))
