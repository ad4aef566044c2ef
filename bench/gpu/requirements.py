"""The distributions that the phases of gpu-check need, read from pyproject.toml and from installed metadata."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "transformers", "triton")
"""Distributions of the extra `dev` that the correctness phase needs; transformers is measured too."""
PROVIDED = (
    "grpcio",
    "numba",
    "prometheus-client",
    "protobuf",
    "pytest",
    "rich",
    "torch",
    "transformers",
    "triton",
    "typer",
)
"""Distributions that a GPU machine without a package index has by itself, with all that these require."""


def needed() -> list[Requirement]:
    """Returns the requirements of the services, the client, the tests on a device and the phases of gpu-check."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    tests = [line for line in extras["dev"] if canonicalize_name(Requirement(line).name) in _TESTS]
    return [Requirement(line) for line in (*project["dependencies"], *extras["executor"], *tests)]


def closure(names: Iterable[str], environment: Mapping[str, str] | None = None) -> set[str]:
    """Returns `names` with everything that these distributions require, by the metadata installed here.

    `environment` replaces values in the markers, such as "python_version". A distribution that is not installed is
    returned without its own requirements.
    """
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [canonicalize_name(each.name) for each in _requirements_of(name, environment)]
    return found


def problems() -> list[str]:
    """Returns a line for each needed distribution that is missing here or has a version that is not allowed.

    It does not look into what PROVIDED distributions require, because builds of torch for one machine differ in that.
    """
    specifiers = {str(canonicalize_name(each.name)): each.specifier for each in needed()}
    own = closure(specifiers.keys() - set(PROVIDED)) | specifiers.keys()
    found = []
    for name in sorted(own):
        version = _installed_version(name)
        if version is None:
            found.append(f"{name} is missing")
        elif name in specifiers and not specifiers[name].contains(version, prereleases=True):
            found.append(f"{name} {version} is not {specifiers[name]}")
    return found


def _requirements_of(name: str, environment: Mapping[str, str] | None) -> Iterator[Requirement]:
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": "", **(environment or {})}):
            yield requirement


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
