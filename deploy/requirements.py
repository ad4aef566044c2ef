"""Prints the project's requirements, one per line, including those of the extras named on the command line."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
print(
    *project["dependencies"],
    *(each for extra in sys.argv[1:] for each in project["optional-dependencies"][extra]),
    sep="\n",
)
