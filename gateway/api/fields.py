"""Reads the fields of a JSON object, and collects every problem. A null counts as an absent field.

Only what the messages of quire.v1 cannot hold is refused here: wrong types, and numbers beyond 32 or 64 bits. The
scheduler checks ranges.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any

from gateway.api.errors import ApiError

MAX_PROBLEMS = 16
MAX_ITEMS = 8192
"""Most objects and texts in all lists of a request. The event loop checks them, 1 to 3 µs each."""

MAX_SHOWN = 60
MAX_UINT32 = 2**32 - 1


class Problems(dict[str, str]):
    """The problems of one request by field, and the number of list items that were checked."""

    num_items = 0


class Fields:
    """The fields of one object. `raise_problems` raises an ApiError that names all of those with a problem.

    path  of the object in the request, with a dot at the end: "stream_options."
    """

    def __init__(self, value: object, path: str = "", problems: Problems | None = None) -> None:
        self.path = path
        self.problems = Problems() if problems is None else problems
        self.values: dict[str, Any] = {}
        if isinstance(value, dict):
            self.values = value
        elif not self.is_full:
            self.problems[path.rstrip(".")] = "must be a JSON object"

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def is_full(self) -> bool:
        """True if no further problem is kept."""
        return len(self.problems) >= MAX_PROBLEMS

    def add_problem(self, name: str, problem: str) -> None:
        if not self.is_full:
            self.problems.setdefault(f"{self.path}{name}", problem)

    def raise_problems(self) -> None:
        """Raises ApiError if a field has a problem."""
        if self.problems:
            message = "; ".join(f"{name}: {problem}" if name else problem for name, problem in self.problems.items())
            raise ApiError(message, param=next(iter(self.problems)) or None)

    def nested(self, name: str) -> "Fields | None":
        """Returns the fields of an object in this one; None if it is absent or no object."""
        value = self.values.get(name)
        if value is None:
            return None
        inner = Fields(value, f"{self.path}{name}.", self.problems)
        return inner if isinstance(value, dict) else None

    def check_names(self, known: Collection[str], neutral: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        """Adds a problem for each field that is not known.

        neutral  fields that are not supported, with the values that mean the same as leaving them out
        """
        neutral = neutral or {}
        others = (name for name, value in self.values.items() if name not in known and value is not None)
        for name in islice(others, len(neutral) + MAX_PROBLEMS):
            if name not in neutral:
                self.add_problem(name[:MAX_SHOWN] or '""', "is not a field of this API")
            elif not any(_is_same(self.values[name], value) for value in neutral[name]):
                self.add_problem(
                    name, "is not supported" + (f", except {_list(neutral[name])}" if neutral[name] else "")
                )

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.values.get(name)
        if value is None:
            return default
        return self.check_text(name, value)

    def check_text(self, name: str, value: object) -> str:
        """Returns a string that is part of a list; an empty one after a problem."""
        if not isinstance(value, str):
            self.add_problem(name, f"must be a string, not {shown(value)}")
            return ""
        try:
            value.encode()
        except UnicodeEncodeError:
            self.add_problem(name, "must be Unicode text, without lone surrogates")
            return ""
        return value

    def required(self, name: str) -> str:
        """Returns a string that must be present; an empty one after a problem."""
        if name not in self:
            self.add_problem(name, "must be given")
        return self.text(name) or ""

    def required_name(self) -> str:
        """Returns the string of the field `name`, which must be present and not empty."""
        name = self.required("name")
        if not name:
            self.add_problem("name", "must not be empty")
        return name

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.add_problem(name, f"must be true or false, not {shown(value)}")
            return default
        return value

    def number(self, name: str) -> float | None:
        value = self.values.get(name)
        return None if value is None else self.check_number(name, value)

    def check_number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            self.add_problem(name, f"must be a number, not {shown(value)}")
            return 0.0
        return float(value)

    def integer(self, name: str, minimum: int = 0, maximum: int = MAX_UINT32) -> int | None:
        value = self.values.get(name)
        return None if value is None else self.check_integer(name, value, minimum, maximum)

    def check_integer(self, name: str, value: object, minimum: int = 0, maximum: int = MAX_UINT32) -> int:
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)  # JavaScript's numbers
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.add_problem(name, f"must be an integer from {minimum} to {maximum}, not {shown(value)}")
            return minimum
        return value

    def items(self, name: str) -> list[Any]:
        """Returns the list with unchecked items; an empty one if it is absent or no list."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.add_problem(name, f"must be a list, not {shown(value)}")
            return []
        return value

    def few_items(self, name: str, most: int) -> list[Any]:
        """Returns the list of `items`; an empty one if it has more than `most`."""
        items = self.items(name)
        if len(items) <= most:
            return items
        self.add_problem(name, f"must be at most {most}, not {len(items)}")
        return []

    def few_entries(self, name: str, most: int) -> dict[str, Any]:
        """Returns the values of an object; none if it is absent, no object or has more than `most`."""
        inner = self.nested(name)
        values = {} if inner is None else inner.values
        if len(values) <= most:
            return values
        self.add_problem(name, f"must be at most {most}, not {len(values)}")
        return {}

    def numbered(self, name: str, items: list[Any]) -> Iterator[tuple[str, Any]]:
        """Yields the name and the value of each item of a list, until no further problem is kept."""
        self.problems.num_items += len(items)
        if self.problems.num_items > MAX_ITEMS:
            self.add_problem(name, f"is too long: all lists of a request may have at most {MAX_ITEMS} items")
            return
        for i, item in enumerate(items):
            if self.is_full:
                return
            yield f"{name}[{i}]", item

    def texts(self, name: str, most: int) -> list[str]:
        """Returns a list of strings; an empty one if the field is absent, no list or has more than `most`."""
        return [self.check_text(place, each) for place, each in self.numbered(name, self.few_items(name, most))]

    def objects(self, name: str, items: list[Any]) -> Iterator["Fields"]:
        """Yields the fields of each item of a list, until no further problem is kept."""
        for place, item in self.numbered(name, items):
            yield Fields(item, f"{self.path}{place}.", self.problems)

    def joined_text(
        self,
        name: str,
        kinds: Collection[str],
        neutral: Mapping[str, tuple[Any, ...]] | None = None,
        ignored: Collection[str] = (),
    ) -> str:
        """Returns a string, or the texts of a list of parts joined with line feeds, as vLLM does.

        kinds    the types that a part may have; all of them are text, which the field `refusal` of a refusal has
        neutral  further fields of a part, as in `check_names`
        ignored  further fields of a part that may have any value
        """
        value = self.get(name)
        if isinstance(value, str):
            return self.check_text(name, value)
        if not isinstance(value, list):
            self.add_problem(name, f"must be a string or a list of text parts, not {shown(value)}")
            return ""
        texts = []
        for part in self.objects(name, value):
            kind = part.get("type")
            if not isinstance(kind, str) or kind not in kinds:
                part.add_problem("type", f"must be {' or '.join(kinds)}, not {shown(kind)}: this model takes text only")
                continue
            key = "refusal" if kind == "refusal" else "text"
            part.check_names({"type", key, *ignored}, neutral)
            texts.append(part.required(key))
        return "\n".join(texts)

    def token_ids(self, name: str, most: int | None = None) -> list[int]:
        """Returns a list of token ids; an empty one after a problem. `most`: None means any number."""
        return self.check_token_ids(name, self.items(name) if most is None else self.few_items(name, most))

    def check_token_ids(self, name: str, values: list[Any]) -> list[int]:
        """Returns the ids; only the first bad one is a problem."""
        if values and not (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_UINT32):
            for i, value in enumerate(values):
                if type(value) is not int or not 0 <= value <= MAX_UINT32:
                    self.add_problem(f"{name}[{i}]", f"must be a token id, not {shown(value)}")
                    return []
        return values


def shown(value: object) -> str:
    """Returns a short form of a value for a message."""
    if isinstance(value, dict | list):
        return f"a {'list' if isinstance(value, list) else 'JSON object'}"
    try:
        text = repr(value[:MAX_SHOWN] if isinstance(value, str) else value)
    except ValueError:  # Python does not convert integers of more than 4300 digits
        return "a number beyond all bounds"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}…"


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _is_same(value: object, neutral: object) -> bool:
    """Compares without the null entries of an object. True and 1 are equal in Python, but not here."""
    if isinstance(value, dict):
        value = {name: entry for name, entry in value.items() if entry is not None}
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _list(values: tuple[Any, ...]) -> str:
    import json

    return " or ".join(json.dumps(value) for value in values)
