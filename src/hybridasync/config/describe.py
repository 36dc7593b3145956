"""What a setting takes, in words: for error messages, help texts and the reference."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_SHORT = {bool: "bool", int: "int", float: "float", str: "string"}


def optional(field: FieldInfo) -> bool:
    """Whether the setting may be left out without having a value."""
    return type(None) in get_args(field.annotation)


def core_type(field: FieldInfo) -> Any:
    """The annotation without `| None` and without constraints."""
    return _split(field.annotation)[0]


def wanted(field: FieldInfo) -> str:
    """For people: `an integer > 0`, `one of sync, hybrid`."""
    kind, _ = _split(field.annotation)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {_NAMES[get_args(kind)[0]].partition(' ')[2]}s"
    if get_origin(kind) is dict:
        return "a table"
    return " or ".join((" ".join((_NAMES[kind], bounds(field))).strip(), *_words(field.annotation)))


def short_type(field: FieldInfo) -> str:
    """For tables: `int > 0`, `sync | hybrid`."""
    kind, _ = _split(field.annotation)
    if get_origin(kind) is Literal:
        return " | ".join(str(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {_SHORT[get_args(kind)[0]]}s"
    if get_origin(kind) is dict:
        return "table"
    return " | ".join((" ".join((_SHORT[kind], bounds(field))).strip(), *_words(field.annotation)))


def bounds(field: FieldInfo) -> str:
    """The limits of a number: `> 0 and < 1`; empty without any."""
    parts = []
    for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
        for mark in (*_split(field.annotation)[1], *field.metadata):
            if (limit := getattr(mark, name, None)) is not None:
                parts.append(f"{sign} {limit}" if isinstance(limit, int) else f"{sign} {limit:g}")
    return " and ".join(parts)


def _words(annotation: Any) -> list[str]:
    """The words that a setting takes beside the values of its type: `auto`."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()
    return [str(word) for option in options[1:] if get_origin(option) is Literal for word in get_args(option)]


def _split(annotation: Any) -> tuple[Any, list[Any]]:
    """The core of an annotation, and the constraints found on the way."""
    marks: list[Any] = []
    while True:
        if get_origin(annotation) in (Union, types.UnionType):
            annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
        elif hasattr(annotation, "__metadata__"):
            marks += _constraints(annotation.__metadata__)
            annotation = annotation.__origin__
        else:
            return annotation, marks


def _constraints(metadata: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for mark in metadata:
        if isinstance(mark, FieldInfo):
            found += mark.metadata
        elif isinstance(mark, annotated_types.BaseMetadata):
            found.append(mark)
    return found
