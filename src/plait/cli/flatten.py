"""Groups of options on the command line: `Saving.checkpoint_every` becomes `--checkpoint-every`.

In: a command that takes groups of `plait.options`. Out: one that typer can read, with an option for every field: its
name, type and default are the field's, its help is the docstring under it.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Annotated, Any

import typer

from plait.docstrings import docstrings


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """How a field is written on a command line, where its type alone does not say."""

    type: Any
    """What typer is to take."""
    metavar: str | None = None
    """What help shows for it."""
    read: Callable[[Any], Any] = lambda value: value
    """From what was written to what the field holds."""
    option: str | None = None
    """Its name, where it is not the field's."""
    help: str | None = None
    """Where the docstring under the field does not do."""


def flattened(
    texts: Mapping[str, Text] = MappingProxyType({}), *, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace parameters that are groups of options by the options; `texts` are those written in a way of their own.

    Fields in `without` are no options of this command: they keep the group's default. A parameter `given` receives the
    names of all options that were given, whatever their values.
    """

    def flatten(command: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(command, include_extras=True)
        groups: dict[str, type] = {}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            kind = hints[parameter.name]
            if is_dataclass(kind) and isinstance(kind, type):
                groups[parameter.name] = kind
                parameters += _options(kind, texts, without)
            elif parameter.name != "given":
                parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(command)
        def flat(**values: Any) -> None:
            given = {name for name, value in values.items() if value is not None}
            for name, group in groups.items():
                own = {field: values.pop(field) for field in _names(group, without)}
                read = {
                    field: texts[field].read(value) if field in texts else value
                    for field, value in own.items()
                    if value is not None
                }
                values[name] = group(**read)
            if "given" in hints:
                values["given"] = frozenset(given)
            command(**values)

        flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return flat

    return flatten


def _names(group: Any, without: Collection[str]) -> list[str]:
    """Fields that a command line has."""
    return [
        field.name
        for field in fields(group)
        if not field.metadata.get("python_only") and field.name not in without
    ]


def _options(group: Any, texts: Mapping[str, Text], without: Collection[str]) -> list[inspect.Parameter]:
    """A parameter for every field; None is "not given", so that the group's own default counts."""
    hints, helps = typing.get_type_hints(group), docstrings(group)
    names, found = _names(group, without), []
    for field in fields(group):
        if field.name not in names:
            continue
        text = texts.get(field.name)
        kind = text.type if text is not None else hints[field.name]
        is_flag = kind is bool
        assert text is not None or not is_flag or field.default is False, (
            f"--{field.name} would change nothing"
        )
        default = "" if field.default in (None, MISSING, ()) or is_flag else f" \\[default: {field.default}]"
        option = typer.Option(
            text.option if text is not None and text.option else "--" + field.name.replace("_", "-"),
            help=((text.help if text is not None else None) or helps.get(field.name, "")) + default,
            metavar=text.metavar if text is not None else None,
            show_default=False,
            rich_help_panel=(group.__doc__ or "").partition("\n")[0].rstrip("."),
        )
        found.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, option],
            )
        )
    return found
