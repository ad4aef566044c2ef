"""The locks of the images hold every package with hashes, in the versions that the tests run with."""

import json
import re
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from checks.supply_chain import Audit, read_audit
from deploy.lock import (
    LOCKS,
    ROOT,
    cpu_builds,
    entries,
    is_cuda_only,
    lock_names,
    render,
    torch_locks,
    wanted,
    without_torch,
)

CONSTRAINTS = {
    canonicalize_name(line.split("==")[0]): line.split("==")[1].strip()
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if re.match(r"[\w.-]+==", line)
}
locks = pytest.mark.parametrize("name", lock_names())
HASH = "--hash=sha256:"


def pins(name: str) -> dict[str, list[str]]:
    return entries((LOCKS / f"{name}.txt").read_text(encoding="utf-8"))


def locked(name: str) -> dict[str, str]:
    return {canonicalize_name(pin.split("==")[0]): pin.split("==")[1].removesuffix("+cpu") for pin in pins(name)}


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


@pytest.mark.parametrize("name", wanted())
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
        if package not in found and package != "torch" and not is_cuda_only(package):
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
    packages = without_torch(entries(made))
    assert packages == {"a==1": ["--hash=sha256:aa", "--hash=sha256:ab"], "b==2": ["--hash=sha256:bb"]}
    assert "wheels" not in render(packages)
    assert entries(render(packages)) == packages


def test_the_locks_of_torch_hold_the_builds_of_one_index_each_and_what_cuda_needs() -> None:
    compiled = {"torch==2": [HASH + "a" * 64], "triton==3": [HASH + "b" * 64], "sympy==1": [HASH + "c" * 64]}
    page = f'<a href="/cpu/torch-2%2Bcpu-cp311-linux.whl#sha256={"d" * 64}">torch-2+cpu-cp311-linux.whl</a>'
    page += f'<a href="/cpu/torch-1%2Bcpu-cp311-linux.whl#sha256={"e" * 64}">torch-1+cpu-cp311-linux.whl</a>'
    locks = torch_locks(compiled, {}, page)
    assert locks == {
        "torch-cpu": {"torch==2+cpu": [HASH + "d" * 64]},
        "torch-cuda": {"torch==2": [HASH + "a" * 64], "triton==3": [HASH + "b" * 64]},
    }
    assert torch_locks(compiled, locks["torch-cpu"], "") == locks
    with pytest.raises(LookupError, match="--cpu-builds"):
        torch_locks({"torch==3": [HASH + "f" * 64]}, locks["torch-cpu"], page)
    assert cpu_builds(page, "2") == [HASH + "d" * 64]


def test_the_images_install_nothing_without_a_hash() -> None:
    for name in ("scheduler", "executor"):
        text = (ROOT / "deploy" / f"{name}.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
        for command in re.findall(r"bin/pip install [^&\n]*", text):
            assert "--no-deps dist/*.whl" in command or "--require-hashes" in command, command


def test_images_that_are_pulled_are_pinned_by_digest() -> None:
    """The build of an image names the same base as compose.yaml."""
    settings = dict(
        line.split("=", 1) for line in (ROOT / ".env").read_text(encoding="utf-8").splitlines() if "_IMAGE=" in line
    )
    for name in ("BASE_IMAGE", "PROMETHEUS_IMAGE", "GRAFANA_IMAGE"):
        assert re.fullmatch(r"[a-z/]+:[\w.-]+@sha256:[0-9a-f]{64}", settings[name]), name
    for name in ("scheduler", "executor"):
        text = (ROOT / "deploy" / f"{name}.Dockerfile").read_text(encoding="utf-8")
        assert f"ARG BASE_IMAGE={settings['BASE_IMAGE']}\n" in text


@pytest.mark.parametrize("report", ["", "[]", "no network", "{}"])
def test_what_is_no_report_of_the_audit_is_not_taken_for_one(report: str) -> None:
    assert read_audit(report) == Audit()


def test_a_package_without_an_answer_was_not_audited() -> None:
    vulnerable = {"name": "a", "version": "1", "vulns": [{"id": "X-1"}]}
    sound, unknown = {"name": "b", "version": "2", "vulns": []}, {"name": "c", "skip_reason": "not found"}
    report = json.dumps({"dependencies": [vulnerable, sound, unknown, unknown]})
    assert read_audit(report) == Audit(2, 2, ("a 1: X-1",))
