"""The fields that restrict an answer to a grammar, as `quire.v1.StructuredOutput`.

Each function returns the JSON name of every path of `structured_output`, so that what the scheduler says about it names
the client's field. A schema is enforced whatever `strict` says, as in vLLM.
"""

import json
from typing import Any

from gateway.api.fields import Fields, shown
from quire.json_depth import is_deep
from quire.json_schemas import has_unwritable_text
from quire.v1 import generation_pb2 as pb

MAX_CHOICES = 1024
"""Most texts of `choice`, as in the scheduler."""

_SCHEMA = {"name", "schema", "strict", "description"}
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_NEUTRAL_BESIDE_KINDS: dict[str, tuple[Any, ...]] = {
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}
_PATHS = ("structured_output", *(f"structured_output.{field.name}" for field in pb.StructuredOutput.DESCRIPTOR.fields))
_PATH_OF_CHOICES = "structured_output.choice.texts"


def add_structured_output(fields: Fields, request: pb.GenerateRequest) -> dict[str, str]:
    """Adds `response_format` or vLLM's `structured_outputs` of OpenAI's completions. Returns names for errors."""
    names: dict[str, str] = {}
    if (form := fields.nested("response_format")) is not None:
        names = _add_response_format(form, request)
    if (given := fields.nested("structured_outputs")) is not None:
        if names:
            fields.add_problem("structured_outputs", "must be absent if response_format restricts the answer")
        names = _add_kind(fields, given, request)
    return names


def add_text_format(text: Fields, request: pb.GenerateRequest) -> dict[str, str]:
    """Adds `text.format` of the Responses API, where a schema is beside its type. Returns names for errors."""
    form = text.nested("format")
    if form is None:
        return {}
    if form.get("type") == "json_schema":
        form.check_names({"type", *_SCHEMA})
        return _add_named_schema(form, request)
    return _add_plain_format(form, request)


def add_output_format(fields: Fields, request: pb.GenerateRequest) -> dict[str, str]:
    """Adds Anthropic's `output_config.format`, or `output_format`, its older name. Returns names for errors."""
    config = fields.nested("output_config")
    if config is not None:
        config.check_names({"format", "effort"}, {"task_budget": ()})
    form = None if config is None else config.nested("format")
    if "output_format" in fields:
        if form is not None:
            fields.add_problem("output_format", "must be absent with output_config.format")
        form = fields.nested("output_format")
    if form is None:
        return {}
    form.check_names({"type", "schema"})
    if form.get("type") != "json_schema":
        form.add_problem("type", f"must be json_schema, not {shown(form.get('type'))}")
        return {}
    return _add_schema(form, request)


def answer_schema(output: pb.StructuredOutput) -> dict[str, Any] | None:
    """Returns the JSON schema of an answer; None for other grammars, and for what the scheduler will refuse."""
    if output.json_object:
        return {"type": "object"}
    try:
        schema = json.loads(output.json_schema or "null")
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) and not is_deep(schema) and not has_unwritable_text(schema) else None


def _add_response_format(form: Fields, request: pb.GenerateRequest) -> dict[str, str]:
    if form.get("type") != "json_schema":
        return _add_plain_format(form, request)
    form.check_names({"type", "json_schema"})
    schema = form.nested("json_schema")
    if schema is None:
        form.add_problem("json_schema", "must be given")
        return {}
    schema.check_names(_SCHEMA)
    return _add_named_schema(schema, request)


def _add_plain_format(form: Fields, request: pb.GenerateRequest) -> dict[str, str]:
    """Adds a format of the type json_object or text."""
    form.check_names({"type"})
    if form.get("type") == "json_object":
        request.structured_output.json_object = True
        return _names(form.path.rstrip("."))
    if form.get("type") != "text":
        form.add_problem("type", f"must be text, json_object or json_schema, not {shown(form.get('type'))}")
    return {}


def _add_named_schema(holder: Fields, request: pb.GenerateRequest) -> dict[str, str]:
    holder.required("name")
    holder.text("description")
    holder.flag("strict")
    return _add_schema(holder, request)


def _add_schema(holder: Fields, request: pb.GenerateRequest) -> dict[str, str]:
    schema = holder.nested("schema")
    if schema is None:
        holder.add_problem("schema", "must be given")
    else:
        request.structured_output.json_schema = _json_text(holder, "schema", schema.values)
    return _names(f"{holder.path}schema")


def _add_kind(fields: Fields, given: Fields, request: pb.GenerateRequest) -> dict[str, str]:
    """Adds the one kind of grammar that `structured_outputs` has."""
    given.check_names(_KINDS, _NEUTRAL_BESIDE_KINDS)
    kinds = [kind for kind in _KINDS if kind in given and given.get(kind) is not False]
    if len(kinds) != 1:
        fields.add_problem("structured_outputs", f"must have exactly one of {', '.join(_KINDS)}")
        return {}
    output, kind = request.structured_output, kinds[0]
    match kind:
        case "json":
            schema = given.get(kind)
            output.json_schema = given.check_text(kind, schema) if isinstance(schema, str) else _json_object(given)
        case "json_object":
            output.json_object = given.flag(kind)
        case "regex":
            output.regex = given.text(kind) or ""
        case "choice":
            output.choice.texts.extend(_choices(given))
        case "grammar":
            output.lark = given.text(kind) or ""
    return _names(f"{given.path}{kind}")


def _choices(given: Fields) -> list[str]:
    choices = given.few_items("choice", MAX_CHOICES)
    if not choices:
        given.add_problem("choice", "must have at least one text")
    return [given.check_text(f"choice[{i}]", each) for i, each in enumerate(choices)]


def _json_object(given: Fields) -> str:
    schema = given.nested("json")
    return "" if schema is None else _json_text(given, "json", schema.values)


def _json_text(holder: Fields, name: str, value: dict[str, Any]) -> str:
    """Returns a schema as text; an empty one after a problem."""
    try:
        return holder.check_text(name, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        holder.add_problem(name, "must have fewer levels")
    except ValueError:
        holder.add_problem(name, "must be JSON, which has no NaN and no Infinity")
    return ""


def _names(place: str) -> dict[str, str]:
    return dict.fromkeys((*_PATHS, _PATH_OF_CHOICES), place)
