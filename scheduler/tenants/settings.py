"""Reads the file of tenants, in TOML, once at start.

    [default]                 every tenant without a table of its own, and the keys that a table leaves out
    requests_per_minute = 600

    [tenants.research]
    weight = 2.0
    default_max_tokens = 1024

Keys are the fields of `TenantTerms` and of `TenantSettings`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

from scheduler.core import QuireError, TenantTerms

MAX_PRIORITY = 1000
"""Largest absolute value of a priority."""


class TenantsError(QuireError):
    """The file of tenants cannot be read, or has an unknown key or a bad value."""


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """The settings of one tenant.

    terms                what the core grants
    requests_per_minute  requests, those refused for now not included; None: any number, as for the next one
    tokens_per_minute    tokens of prompts and outputs
    default_max_tokens   max_tokens of requests that set none; None: as many as fit
    default_n            n of requests that set none
    """

    terms: TenantTerms = field(default_factory=TenantTerms)
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    default_max_tokens: int | None = None
    default_n: int = 1


@dataclass(frozen=True, slots=True)
class Tenants:
    """The settings of all tenants. Tenants without a table have those of `default`."""

    default: TenantSettings = field(default_factory=TenantSettings)
    by_name: Mapping[str, TenantSettings] = field(default_factory=dict)

    def settings_of(self, tenant: str) -> TenantSettings:
        return self.by_name.get(tenant, self.default)

    def terms_of(self, tenant: str) -> TenantTerms:
        return self.settings_of(tenant).terms

    def max_num_seqs_of(self, tenant: str) -> int:
        """Returns the most sequences that a tenant may run at once; a large number if there is no limit."""
        return self.terms_of(tenant).max_num_seqs or 2**31

    @classmethod
    def load(cls, path: str | None) -> "Tenants":
        """Reads the file; without a path, all tenants are equal. Raises TenantsError."""
        if path is None:
            return cls()
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise TenantsError(f"tenants: {path}: {error}") from None
        if unknown := sorted(document.keys() - {"default", "tenants"}):
            raise TenantsError(
                f"tenants: {path}: unknown tables: {', '.join(unknown)}; they are [default], [tenants.NAME]"
            )
        default = _table(document.get("default", {}), f"{path}: [default]")
        tables = document.get("tenants", {})
        if not isinstance(tables, dict):
            raise TenantsError(f"tenants: {path}: tenants must be tables [tenants.NAME]")
        by_name = {}
        for name, values in tables.items():
            place = f"{path}: [tenants.{name}]"
            by_name[name] = _settings(default | _table(values, place), place)
        return cls(_settings(default, f"{path}: [default]"), by_name)


_TERMS = {each.name for each in fields(TenantTerms)}
_KEYS = _TERMS | {each.name for each in fields(TenantSettings)} - {"terms"}


def _table(values: Any, place: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise TenantsError(f"tenants: {place} must be a table")
    if unknown := sorted(values.keys() - _KEYS):
        raise TenantsError(f"tenants: {place}: unknown keys: {', '.join(unknown)}")
    for key, value in values.items():
        _check(key, value, place)
    return values


def _check(key: str, value: Any, place: str) -> None:
    is_integer = type(value) is int
    if key == "weight":
        if not (is_integer or type(value) is float) or not isfinite(value) or not 0.001 <= value <= 1000:
            raise TenantsError(f"tenants: {place}: weight must be a number from 0.001 to 1000, not {value!r}")
    elif key == "priority":
        if not is_integer or abs(value) > MAX_PRIORITY:
            raise TenantsError(
                f"tenants: {place}: priority must be a whole number up to ±{MAX_PRIORITY}, not {value!r}"
            )
    elif not is_integer or not 1 <= value < 2**31:
        raise TenantsError(f"tenants: {place}: {key} must be a whole number from 1 to {2**31 - 1}, not {value!r}")


def _settings(values: dict[str, Any], place: str) -> TenantSettings:
    terms = TenantTerms(**{key: value for key, value in values.items() if key in _TERMS})
    settings = TenantSettings(terms, **{key: value for key, value in values.items() if key not in _TERMS})
    if terms.max_num_seqs is not None and settings.default_n > terms.max_num_seqs:
        raise TenantsError(f"tenants: {place}: default_n must be at most max_num_seqs ({terms.max_num_seqs})")
    return settings
