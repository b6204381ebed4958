"""Annotations in msgspec's words: what others write beside a type is kept.

    Annotated[str, "What to look for."]        Annotated[str, Doc("What to look for.")]
    Annotated[int, Field(ge=1, description="How many.")]        Annotated[int, Ge(1)]

pydantic and annotated_types are known by the names of their attributes; neither has to be installed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from msgspec import Meta

_CONSTRAINTS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length")


def to_msgspec_type(kind: Any) -> Any:
    """A type that msgspec reads as it was meant. TypeError if something beside it cannot be meant so."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _with_notes(to_msgspec_type(inner[0]), kind.__metadata__)
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, [to_msgspec_type(one) for one in inner])
    if isinstance(origin, type) and inner:
        # Literal's arguments are values and Callable's are lists; those of classes are types.
        return origin[tuple(one if one is ... else to_msgspec_type(one) for one in inner)]  # type: ignore[index]
    return kind


def with_null(kind: Any) -> Any:
    """The type, with null among its values; what stands beside it stays where it is."""
    if get_origin(kind) is Annotated:
        return Annotated[(with_null(get_args(kind)[0]), *kind.__metadata__)]
    return kind if kind in (Any, None) else kind | None


def _with_notes(kind: Any, notes: Iterable[Any]) -> Any:
    for note in notes:
        if isinstance(note, Meta):
            kind = Annotated[kind, note]
            continue
        for limit in _constraints(note):
            kind = _constrained(kind, limit)
        if words := _description(note):
            kind = Annotated[kind, Meta(description=words)]
    return kind


def _constrained(kind: Any, limit: Meta) -> Any:
    """Of several types, each that is no null is limited: `int | None` from 3 on."""
    if get_origin(kind) in (Union, UnionType):
        each = [one if one is NoneType else _constrained(one, limit) for one in get_args(kind)]
        return functools.reduce(operator.or_, each)
    return Annotated[kind, limit]


def _description(note: Any) -> str:
    """A note that is a text, or has one: pydantic's Field and msgspec's Meta, or PEP 727's Doc."""
    if isinstance(note, str):
        return note
    for name in ("description", "documentation"):
        if isinstance(words := getattr(note, name, None), str):
            return words
    return ""


def _constraints(note: Any) -> list[Meta]:
    """What a note says of values: its own attributes, and those of the notes that it gathers."""
    gathered = getattr(note, "metadata", None)
    if isinstance(gathered, list | tuple):
        return [limit for one in gathered for limit in _constraints(one)]
    if isinstance(note, str | type):
        return []
    told: list[dict[str, Any]] = [
        {name: value}
        for name in _CONSTRAINTS
        if isinstance(value := getattr(note, name, None), int | float) and not isinstance(value, bool)
    ]
    pattern = getattr(note, "pattern", None)
    if isinstance(pattern := getattr(pattern, "pattern", pattern), str):
        told.append({"pattern": pattern})
    return [Meta(**limit) for limit in told]
