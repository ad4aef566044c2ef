"""Random JSON schemas over the keywords that grammars of structured output can enforce."""

import random
import string
from typing import Any

Schema = dict[str, Any]

_PATTERNS = (r"^[a-z]{1,6}$", r"^(yes|no|maybe)$", r"^\d{3}-\d{2}$", r"^[A-Z][a-z]{2,5}( [A-Z][a-z]{2,5})?$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")
_NAMES = ("name", "age", "colour", "größe", "is brave", "friends", 'a "b"', "x\\y", "z")
_MAX_DEPTH = 3


class RandomSchemas:
    """Draws schemas from a seed. Each one has texts, and most of them are short."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> Schema:
        """Returns a schema, with definitions if it refers to some."""
        schema = self._object(0) if self._random.random() < 0.7 else self._any(0)
        if self._random.random() < 0.3:
            schema = {
                "type": "object",
                "properties": {"first": {"$ref": "#/$defs/part"}, "rest": self._list_of({"$ref": "#/$defs/part"})},
                "required": ["first", "rest"],
                "additionalProperties": False,
                "$defs": {"part": schema},
            }
        return schema

    def _any(self, depth: int) -> Schema:
        simple = [self._string, self._integer, self._number, self._constant, self._boolean]
        nested = [self._object, self._array, self._tuple, self._map, self._any_of, self._all_of]
        draw = self._random.choice(simple if depth >= _MAX_DEPTH else simple + nested)
        return draw(depth + 1)

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_NAMES, self._random.randint(1, 4))
        required = [name for name in names if self._random.random() < 0.7]
        schema: Schema = {"type": "object", "properties": {name: self._any(depth + 1) for name in names}}
        if required:
            schema["required"] = required
        if self._random.random() < 0.8:
            schema["additionalProperties"] = False
        return schema

    def _map(self, depth: int) -> Schema:
        values = self._any(depth)
        if self._random.random() < 0.5:
            return {"type": "object", "additionalProperties": values, "maxProperties": self._random.randint(1, 3)}
        return {"type": "object", "patternProperties": {"^k[0-9]$": values}, "additionalProperties": False}

    def _array(self, depth: int) -> Schema:
        return self._list_of(self._any(depth))

    def _list_of(self, items: Schema) -> Schema:
        least = self._random.randint(0, 2)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + self._random.randint(0, 2)}

    def _tuple(self, depth: int) -> Schema:
        prefix = [self._any(depth) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": prefix, "items": False, "minItems": len(prefix)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._random.randint(2, 3))]}

    def _all_of(self, depth: int) -> Schema:
        low = self._random.randint(-50, 50)
        return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + self._random.randint(0, 99)}]}

    def _string(self, depth: int) -> Schema:
        match self._random.randrange(4):
            case 0:
                least = self._random.randint(0, 4)
                return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 20)}
            case 1:
                return {"type": "string", "pattern": self._random.choice(_PATTERNS)}
            case 2:
                return {"type": "string", "format": self._random.choice(_FORMATS)}
        return {"type": ["string", "null"], "maxLength": 30}

    def _integer(self, depth: int) -> Schema:
        low = self._random.randint(-1000, 1000)
        high = low + self._random.randint(1, 500)
        match self._random.randrange(3):
            case 0:
                return {"type": "integer", "minimum": low, "maximum": high}
            case 1:
                return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 1}
        return {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": self._random.choice((2, 5, 7, 10))}

    def _number(self, depth: int) -> Schema:
        low = self._random.randint(-100, 100) / 4
        return {"type": "number", "minimum": low, "maximum": low + self._random.randint(0, 100) / 4}

    def _constant(self, depth: int) -> Schema:
        values: list[Any] = [self._word(), self._random.randint(-9, 99), True, None, [1, "a"], {"k": self._word()}]
        if self._random.random() < 0.3:
            return {"const": self._random.choice(values)}
        return {"enum": self._random.sample(values, self._random.randint(1, 4))}

    def _boolean(self, depth: int) -> Schema:
        return {"type": self._random.choice(("boolean", "null"))}

    def _word(self) -> str:
        return "".join(self._random.choices(string.ascii_letters + ' "\\/äß€', k=self._random.randint(0, 6)))
