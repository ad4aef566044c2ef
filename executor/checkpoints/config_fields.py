"""Typed access to a JSON object: each access says what it expects, and each error names the field."""

from collections.abc import Mapping
from typing import Any, overload

from executor.errors import CheckpointError

_REQUIRED: Any = object()
_MAX_SIZE = (1 << 31) - 1  # positions and token ids are int32
_MAX_NUMBER = 3.4e38  # of float32


class Fields:
    """A view of one JSON object. A field that is absent or null takes the default; without a default it is an error."""

    __slots__ = ("_content", "_prefix")

    def __init__(self, content: Mapping[str, Any], prefix: str = "") -> None:
        self._content = content
        self._prefix = prefix

    @overload
    def size(self, name: str, default: int = ...) -> int: ...
    @overload
    def size(self, name: str, default: None) -> int | None: ...
    def size(self, name: str, default: int | None = _REQUIRED) -> int | None:
        """Returns an integer above 0."""
        value = self._get(name, default)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise self._error(name, "a positive integer", value)
        if value is not None and value > _MAX_SIZE:
            raise self._error(name, f"at most {_MAX_SIZE}", value)
        return value

    def nullable_size(self, name: str, absent: int) -> int | None:
        """Returns an integer above 0; None if the field is null, and `absent` if there is no such field."""
        return self.size(name, None) if name in self._content else absent

    def count(self, name: str, default: int) -> int:
        """Returns an integer, 0 or more."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._error(name, "an integer, 0 or more", value)
        return value

    def number(self, name: str, default: float = _REQUIRED) -> float:
        """Returns a number of float32, 0 or more."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_NUMBER:
            raise self._error(name, f"a number from 0 to {_MAX_NUMBER:g}", value)
        return float(value)

    def positive(self, name: str, default: float = _REQUIRED) -> float:
        """Returns a number of float32 above 0."""
        if not (value := self.number(name, default)):
            raise self._error(name, "a positive number", value)
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """Returns a list of positive numbers."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or not all(
            isinstance(item, int | float) and 0 < item <= _MAX_NUMBER for item in value
        ):
            raise self._error(name, "a list of positive numbers", value)
        return tuple(float(item) for item in value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._error(name, "true or false", value)
        return value

    def strings(self, name: str) -> tuple[str, ...] | None:
        value = self._get(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._error(name, "a list of strings", value)
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self._get(name, None)
        if value is not None and not isinstance(value, dict):
            raise self._error(name, "an object", value)
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._content.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self._prefix}{name}: missing")
        return default

    def _error(self, name: str, expected: str, value: object) -> CheckpointError:
        return CheckpointError(f"{self._prefix}{name}: expected {expected}, found {value!r}")
