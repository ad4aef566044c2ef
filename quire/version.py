"""The version of Quire."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache  # reads the metadata of the package
def build_version() -> str:
    """Returns the version of the installed package, or "unknown" in a checkout that is not installed."""
    try:
        return version("quire")
    except PackageNotFoundError:
        return "unknown"
