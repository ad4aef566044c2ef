"""Which Quire this is."""

from importlib.metadata import PackageNotFoundError, version


def build_version() -> str:
    """Of the installed package; "unknown" where it runs from a bare checkout."""
    try:
        return version("quire")
    except PackageNotFoundError:
        return "unknown"
