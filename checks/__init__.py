"""Checks of `make lint` and CI besides ruff, mypy and the tests. Each is a module: `python -m checks.NAME`."""
