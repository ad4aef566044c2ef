"""Checks the settings of a service. The functions raise ConfigError, whose message names the field."""

import re
import string
from collections.abc import Collection, Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_type_hints
from urllib.parse import urlsplit

from quire.addresses import UNIX, is_address

_AROUND_ADDRESSES = "," + string.whitespace
_BETWEEN_ADDRESSES = re.compile(r"[,\s]+(?=unix:|[^,\s/]+:\d+(?:[,\s]|$))")


class ConfigError(Exception):
    """The configuration is contradictory or has a bad value. The message names the field."""


def check_keys(values: Mapping[str, Any], kind: type[Any]) -> None:
    """Raises ConfigError for a key that is no field of the dataclass."""
    unknown = sorted(set(values) - {each.name for each in fields(kind)})
    if unknown:
        raise ConfigError(f"unknown keys: {', '.join(unknown)}")


def check_types(config: Any) -> None:
    """Raises ConfigError unless each field has its type. An int is also a float; numbers must be positive."""
    types = get_type_hints(type(config))
    for each in fields(config):
        _check_type(each.name, getattr(config, each.name), get_args(types[each.name]) or (types[each.name],))


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raises ConfigError unless the value is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def check_address(name: str, address: str, expected: str) -> None:
    """Raises ConfigError unless this is an address; a Unix socket only if `expected` names it."""
    if not is_address(address) or (address.startswith(UNIX) and UNIX not in expected):
        raise ConfigError(f"{name} must be {expected}, not {address!r}")


def names(text: str) -> list[str]:
    """Returns the names in a text, which separates them by commas or spaces."""
    return text.replace(",", " ").split()


def addresses(text: str) -> list[str]:
    """Returns the addresses in a text, which separates them as names. A path can have spaces."""
    return [each for each in _BETWEEN_ADDRESSES.split(text.strip(_AROUND_ADDRESSES)) if each]


def is_url(text: str) -> bool:
    """Returns whether this is a URL with http or https, a host, and no impossible port."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_type(name: str, value: object, types: tuple[type, ...]) -> None:
    """Raises ConfigError unless the value has one of the types, and is positive and finite if it is a number."""
    if not (type(value) in types or (type(value) is int and float in types)):
        words = " or ".join("absent" if kind is NoneType else kind.__name__ for kind in types)
        raise ConfigError(f"{name} must be {words}, not {value!r}")
    if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be positive and finite, not {value!r}")
