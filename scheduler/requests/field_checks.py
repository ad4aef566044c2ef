"""Checks of single fields, each of which may be of any type: what is wrong is collected, by field path."""

import struct
from collections.abc import Mapping, Sequence, Sized

from scheduler.core import InvalidRequest

MAX_VIOLATIONS = 64
"""Of one request. They do not tell more by being more."""

MAX_SHOWN = 40
"""Characters of a value."""


class FieldChecks:
    """Collects what is wrong, up to MAX_VIOLATIONS. Each check returns the value if it is right, and something harmless
    if it is not."""

    def __init__(self) -> None:
        self.violations: dict[str, str] = {}

    def add(self, field: str, problem: str) -> None:
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.setdefault(field, problem)

    def finish(self) -> None:
        if self.violations:
            raise InvalidRequest(self.violations)

    def integer(self, field: str, value: int | None, least: int, most: int, default: int) -> int:
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:  # bool is an int, too
            self.add(field, f"must be a whole number from {least} to {most}, not {_shown(value)}")
            return default
        return value

    def number(
        self,
        field: str,
        value: float | None,
        least: float,
        most: float,
        default: float,
        *,
        above: bool = False,
    ) -> float:
        """Returns the float32 that goes to the executor: a door that reads doubles lets in what becomes 0 there.

        The bounds are float32 numbers themselves, so that none is rounded past them. `above`: it must be greater than
        `least`, once rounded. NaN is in no range.
        """
        if value is None:
            return default
        is_number = type(value) is float or type(value) is int
        if is_number and least <= value <= most:
            rounded = _as_float32(value)
            if not (above and rounded == least):
                return rounded
        words = f"above {least} and at most {most}" if above else f"from {least} to {most}"
        self.add(field, f"must be a number {words}, not {_shown(value)}")
        return default

    def flag(self, field: str, value: bool | None) -> bool:
        if value is None or isinstance(value, bool):
            return bool(value)
        self.add(field, f"must be true or false, not {_shown(value)}")
        return False

    def text(self, field: str, value: str, max_bytes: int) -> str:
        if not isinstance(value, str):
            self.add(field, f"must be a string, not {_shown(value)}")
            return ""
        if len(value) > max_bytes:  # before it is encoded: a character has at least one byte
            self.add(field, f"must have at most {max_bytes} bytes, not {len(value)} and more")
            return ""
        try:
            num_bytes = len(value.encode())
        except UnicodeEncodeError:
            self.add(field, "must be Unicode text, without lone surrogates")
            return ""
        if num_bytes > max_bytes:
            self.add(field, f"must have at most {max_bytes} bytes, not {num_bytes}")
            return ""
        return value

    def stop_strings(self, field: str, values: Sequence[str], max_num: int, max_bytes: int) -> list[str]:
        """Returns those that are right, and names each that is not."""
        if not self.is_list(field, values, max_num):
            return []
        strings = [self.text(f"{field}[{i}]", value, max_bytes) for i, value in enumerate(values)]
        for i, string in enumerate(strings):
            if not string:
                self.add(f"{field}[{i}]", "must not be empty")
        return [string for string in strings if string]

    def token_ids(self, field: str, values: Sequence[int], vocab_size: int, max_num: int | None = None) -> list[int]:
        """Returns them all as a list, or names the first that is wrong."""
        if not self.is_list(field, values, max_num):
            return []
        token_ids = list(values)
        # In bulk first: a prompt may have 100,000 of them, nearly always good.
        if not token_ids:
            return token_ids
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
            return token_ids
        for i, value in enumerate(token_ids):
            if type(value) is not int or not 0 <= value < vocab_size:
                problem = f"must be a token id from 0 to {vocab_size - 1}, not {_shown(value)}"
                self.add(f"{field}[{i}]", problem)
                break
        return []

    def is_list(self, field: str, values: object, max_num: int | None = None) -> bool:
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            self.add(field, f"must be a list, not {_shown(values)}")
            return False
        if max_num is not None and len(values) > max_num:
            self.add(field, f"must be at most {max_num}, not {len(values)}")
            return False
        return True

    def token_biases(
        self, field: str, values: Mapping[int, float], vocab_size: int, max_num: int, bound: float
    ) -> dict[int, float]:
        """Token id → what is added to its logit, within ±bound; names each entry that is wrong."""
        if not isinstance(values, Mapping):
            self.add(field, f"must be a map of token ids, not {_shown(values)}")
            return {}
        if len(values) > max_num:
            self.add(field, f"must be at most {max_num}, not {len(values)}")
            return {}
        biases = {}
        for token_id, value in values.items():
            path = f"{field}[{_shown(token_id)}]"
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                self.add(path, f"must be of a token id from 0 to {vocab_size - 1}")
            elif value is None:
                self.add(path, "must be a number")
            else:
                biases[token_id] = self.number(path, value, -bound, bound, 0.0)
        return biases


def _as_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _shown(value: object) -> str:
    """A value as a message can carry it, made without a look at all of it. Numbers of more than 4300 digits have no
    decimal form in Python."""
    if isinstance(value, str | bytes):
        value = value[:MAX_SHOWN]
    elif isinstance(value, Sized):
        return f"a {type(value).__name__} of {len(value)}"
    try:
        text = repr(value)
    except ValueError:
        return "a number beyond all bounds"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}…"
