"""Generates command-line flags from a configuration dataclass, one for each field.

The dataclass is the only declaration of the settings of a service. Names, types, defaults and help texts (the lines
`name  text` of the docstring) come from there. A flag that is not given is left out of the values.
"""

import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Union

import typer

from quire.options import flag_texts


def flag_parameters(config: type[Any], leave_out: Collection[str] = ()) -> list[inspect.Parameter]:
    """Returns a keyword parameter for each field, as typer reads them: None if the flag is not given."""
    types = typing.get_type_hints(config)
    texts = flag_texts(config)
    return [
        flag(field.name, _plain_type(types[field.name]), _option(field, texts.get(field.name, "")))
        for field in fields(config)
        if field.name not in leave_out
    ]


def flag(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """Returns a keyword parameter as typer reads it: None if the flag is not given."""
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_defaults(parameters: Iterable[inspect.Parameter], defaults: Mapping[str, Any]) -> list[inspect.Parameter]:
    """Returns the parameters with these defaults in their help texts, for a command that has its own."""
    return [
        _with_default(parameter, defaults[parameter.name]) if parameter.name in defaults else parameter
        for parameter in parameters
    ]


def with_flags(function: Callable[..., Any], parameters: Iterable[inspect.Parameter]) -> Callable[..., Any]:
    """Returns the function with the signature that typer reads: `parameters` instead of `**values`."""
    own = [
        parameter
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    seen = [*own, *parameters]

    def command(**values: Any) -> Any:
        return function(**values)

    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in seen}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # read by inspect, and so by typer
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in seen]
    )
    return command


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags that were given."""
    return {name: value for name, value in values.items() if value is not None}


def arguments(values: Mapping[str, Any]) -> list[str]:
    """Returns the command line for `values`: the inverse of parsing it."""
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.extend((f"--{flag}", str(value)))
    return words


def _option(field: Field[Any], text: str) -> Any:
    has_default = field.default not in (MISSING, None, "")
    return typer.Option(help=text + (f" [default: {field.default}]" if has_default else ""), show_default=False)


def _with_default(parameter: inspect.Parameter, default: Any) -> inspect.Parameter:
    annotation, option = typing.get_args(parameter.annotation)
    text = option.help.partition(" [default: ")[0]
    option = typer.Option(help=f"{text} [default: {default}]", show_default=False)
    return parameter.replace(annotation=Annotated[annotation, option])


def _plain_type(annotation: Any) -> Any:
    """Returns `int` for `int | None`."""
    if typing.get_origin(annotation) in (Union, UnionType):
        (annotation,) = (part for part in typing.get_args(annotation) if part is not NoneType)
    return annotation
