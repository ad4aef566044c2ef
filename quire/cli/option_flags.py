"""The flags of `quire generate`: one for each option of a request, generated from the clients' own declaration."""

import inspect
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, cast

import typer

from quire.cli import exit_codes
from quire.cli.outcome import fail
from quire.options import GenerateOptions, flag_texts

_WITHOUT_FLAG = frozenset({"request_id"})
_SHORT_FLAGS = {"n": "-n"}


def option_parameters() -> list[inspect.Parameter]:
    """Returns a keyword parameter for each option, as typer reads them: None if the flag is not given."""
    texts = flag_texts(GenerateOptions)
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, kind, texts[name])
        )
        for name, kind in typing.get_type_hints(GenerateOptions).items()
        if name not in _WITHOUT_FLAG
    ]


def given_options(values: Mapping[str, Any]) -> GenerateOptions:
    """Returns the options whose flags were given. Ends the command for a flag that cannot be understood."""
    options = {name: value for name, value in values.items() if value is not None and value != []}
    if "logit_bias" in options:
        options["logit_bias"] = _biases(options["logit_bias"])
    if "json_schema" in options:
        options["json_schema"] = _file_text(options["json_schema"])
    return cast("GenerateOptions", options)


def _annotation(name: str, kind: Any, text: str) -> Any:
    """Returns the type and the flag of an option. The flag of a list has a singular name and may be repeated."""
    flags = [f"--{name.replace('_', '-')}", *filter(None, [_SHORT_FLAGS.get(name)])]
    kinds = [part for part in typing.get_args(kind) if part is not NoneType]
    origins = {typing.get_origin(part): part for part in kinds}
    if name == "json_schema":
        return Annotated[str | None, typer.Option(*flags, metavar="FILE", help="write JSON of the schema in this file")]
    if Mapping in origins:
        return Annotated[list[str] | None, typer.Option(*flags, metavar="ID=VALUE", help=f"{text}; may be repeated")]
    if Sequence in origins:
        items: Any = list.__class_getitem__(typing.get_args(origins[Sequence]))
        return Annotated[items | None, typer.Option(flags[0].removesuffix("s"), help=f"{text}; may be repeated")]
    return Annotated[kinds[0] | None, typer.Option(*flags, help=text)]


def _file_text(path: str) -> str:
    """Returns the text of a file. Ends the command if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--json-schema: cannot read {path}: {error}", exit_codes.USAGE)


def _biases(entries: Iterable[str]) -> dict[int, float]:
    """Parses `["17=-5", "4=2.5"]` into {17: -5.0, 4: 2.5}."""
    biases = {}
    for entry in entries:
        token_id, _, value = entry.partition("=")
        try:
            biases[int(token_id)] = float(value)
        except ValueError:
            fail(f"--logit-bias: expected ID=VALUE, not {entry!r}", exit_codes.USAGE)
    return biases
