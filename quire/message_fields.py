"""Sets the fields of messages from a client's values. A value that does not fit becomes a violation of its path."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.v1 import generation_pb2

GRAMMAR_HOLDER = "structured_output"
GRAMMARS = tuple(generation_pb2.StructuredOutput.DESCRIPTOR.fields_by_name)
"""The options that are kinds of grammars, and the field of the request that holds them."""


def set_field(target: Any, name: str, value: Any, path: str, violations: dict[str, str]) -> None:
    """Sets a scalar, repeated or map field. A value that does not fit the type becomes a violation of `path`."""
    try:
        if isinstance(value, Mapping):
            getattr(target, name).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    except AttributeError:  # a single value for a repeated field or a map, or vice versa
        violations[path] = f"cannot be of type {type(value).__name__}"
    except (TypeError, ValueError, OverflowError) as error:
        violations[path] = str(error)


def set_grammar(output: generation_pb2.StructuredOutput, name: str, value: Any, violations: dict[str, str]) -> None:
    """Sets one kind of grammar; a second one is a violation. `json_object=False` asks for none."""
    if name == "json_object" and value is False:
        return
    if other := output.WhichOneof("grammar"):
        violations[GRAMMAR_HOLDER] = f"must be one grammar, not {other} and {name}"
        return
    path = f"{GRAMMAR_HOLDER}.{name}"
    if name == "choice":
        output.choice.SetInParent()
        set_field(output.choice, "texts", value, f"{path}.texts", violations)
        return
    if name == "json_schema" and isinstance(value, Mapping):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError) as error:  # a value that JSON lacks, or a circle
            violations[path] = str(error)
            return
    set_field(output, name, value, path, violations)
