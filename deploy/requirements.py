"""Prints what the project depends on, with the extras named on the command line: one requirement a line."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
print(
    *project["dependencies"],
    *(each for extra in sys.argv[1:] for each in project["optional-dependencies"][extra]),
    sep="\n",
)
