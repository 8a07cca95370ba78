"""Makes command-line options from the fields of a pydantic model, and hands the command an instance of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from costcache.errors import SettingsError, reason

__all__ = ["Options", "model_options"]

F = TypeVar("F", bound=Callable[..., Any])


class Options(BaseModel):
    """Base of models for options that belong to the command line alone."""

    model_config = ConfigDict(frozen=True)


class _Integer(click.IntRange):
    """An integer with its range in the help; the model checks it, so that all its errors read alike."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return click.INT.convert(value, param, ctx)


class _Float(click.FloatRange):
    """The same for a float."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return click.FLOAT.convert(value, param, ctx)


_TYPES: dict[Any, click.ParamType[Any]] = {
    int: click.INT,
    float: click.FLOAT,
    str: click.STRING,
    Path: click.Path(path_type=Path),
}


def model_options(
    model: type[BaseModel], argument: str, *fields: str, prefix: str = "", **given: Mapping[str, Any]
) -> Callable[[F], F]:
    """Decorate a command with an option per field of a model.

    A field's type, bounds, default and description become those of its option. A bool becomes a flag
    (``--x/--no-x`` if it is True by default), a Literal a choice, a tuple an option that may be repeated.

    Args:
        model: The model.
        argument: The command's argument that takes the instance.
        fields: The fields to offer, in the order of the help; all by default.
        prefix: Begins the help of each option (``"With --serving, "``).
        given: By field, attributes of its ``click.option`` that differ; ``flag`` is its name.

    Raises:
        SettingsError: When the command runs, if the model refuses a value: names the option, the value and
            what is allowed.
    """
    names = fields or tuple(model.model_fields)
    flags = {name: given.get(name, {}).get("flag", f"--{name.replace('_', '-')}") for name in names}

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            instance = _instance(model, {name: values.pop(name) for name in names}, flags)
            return command(**values, **{argument: instance})

        for name in reversed(names):
            attributes = _attributes(model.model_fields[name], prefix) | dict(given.get(name, {}))
            flag = attributes.pop("flag", flags[name])
            if attributes.get("is_flag") and attributes["default"]:
                flag = f"{flag}/--no-{flag.removeprefix('--')}"
            click.option(flag, name, **attributes)(run)
        return run  # type: ignore[return-value] # a command of other arguments, which only click calls

    return decorate


def _instance(model: type[BaseModel], values: dict[str, Any], flags: Mapping[str, str]) -> BaseModel:
    try:
        return model(**values)
    except ValidationError as error:
        problems = [
            f"{flags[str(item['loc'][0])]} is {item['input']!r}: {reason(item)}"
            if item["loc"]
            else reason(item)
            for item in error.errors()
        ]
        raise SettingsError("; ".join(problems)) from None


def _attributes(field: FieldInfo, prefix: str) -> dict[str, Any]:
    """The attributes of a field's ``click.option``."""
    text = field.description or ""
    attributes: dict[str, Any] = {"help": prefix + text[:1].lower() + text[1:] if prefix else text}
    default = field.get_default(call_default_factory=True)
    kind = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        attributes["multiple"] = True
    if kind is bool:
        return attributes | {"is_flag": True, "default": default, "show_default": default}
    attributes |= {"required": True} if field.is_required() else {"default": default, "show_default": True}
    attributes["type"] = click.Choice(get_args(kind)) if get_origin(kind) is Literal else _type(kind, field)
    return attributes


def _type(kind: Any, field: FieldInfo) -> click.ParamType[Any]:
    """The type of an option, with the field's bounds if it has any."""
    bounds = {
        key: value
        for each in field.metadata
        for key in ("ge", "gt", "le", "lt")
        if (value := getattr(each, key, None)) is not None
    }
    if not bounds:
        return _TYPES[kind]
    bounded = _Integer if kind is int else _Float
    return bounded(
        min=bounds.get("ge", bounds.get("gt")),
        max=bounds.get("le", bounds.get("lt")),
        min_open="gt" in bounds,
        max_open="lt" in bounds,
    )
