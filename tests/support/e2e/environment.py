"""A Python environment that contains only the scheduler's dependencies.

It equals what `pip install quire` makes, but nothing is installed: the files of all distributions that the project
requires, directly or indirectly, are linked from the environment that runs the tests.
"""

import sys
import tomllib
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.e2e.process import ROOT


def scheduler_environment(directory: Path) -> Path:
    """Makes the environment in a directory; returns its interpreter."""
    venv.create(directory, symlinks=True, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = directory / "lib" / version / "site-packages"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for found in _closure(project["project"]["dependencies"]):
        _link(found, packages)
    for package in project["tool"]["hatch"]["build"]["hooks"]["custom"]["packages"]:
        (packages / package).symlink_to(ROOT / package)
    return directory / "bin" / "python"


def _closure(requirements: list[str]) -> list[Distribution]:
    """Returns the installed distributions that the requirements need, directly or indirectly, including extras."""
    found: dict[str, Distribution] = {}
    followed: set[tuple[str, str]] = set()
    wanted = [(requirement, "") for requirement in requirements]
    while wanted:
        text, extra_of_parent = wanted.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra_of_parent}):
            continue
        found.setdefault(requirement.name.lower(), distribution(requirement.name))
        for extra in {"", *requirement.extras}:
            if (requirement.name.lower(), extra) not in followed:
                followed.add((requirement.name.lower(), extra))
                wanted += [(needed, extra) for needed in found[requirement.name.lower()].requires or ()]
    return list(found.values())


def _link(found: Distribution, packages: Path) -> None:
    """Links the files of a distribution into a site-packages directory."""
    for file in found.files or ():
        if ".." in file.parts or file.suffix == ".pyc":  # console scripts, and files that Python generates
            continue
        link = packages / file
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(Path(str(found.locate_file(file))).resolve())
