"""Values of options: from text, from a file's value, and back to plain data. One rule for each type.

A list takes several values: an option is repeated, a variable has one a line or a JSON array. Counts by name
are NAME=N in the same way; other mappings are JSON objects.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_SWITCHES = {"true": True, "yes": True, "on": True, "1": True,
             "false": False, "no": False, "off": False, "0": False}  # fmt: skip


class WrongValueError(ValueError):
    """A value that an option cannot have; the message is what was expected."""

    def __init__(self, value: object, expected: str) -> None:
        super().__init__(expected)
        self.value = value
        self.expected = expected


class ValueType:
    """The type of an option's value, as its annotation has it."""

    def __init__(self, hint: Any) -> None:
        self.is_optional = get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)
        if self.is_optional:
            (hint,) = [part for part in get_args(hint) if part is not type(None)]
        origin = get_origin(hint)
        self.choices: tuple[str, ...] = get_args(hint) if origin is Literal else ()
        self.is_list = origin in (tuple, list, Sequence)
        self.is_mapping = origin in (dict, Mapping)
        self.is_counts = self.is_mapping and get_args(hint)[1] is int
        item = get_args(hint)[0] if self.is_list else hint
        if self.is_list and get_origin(item) is Literal:
            self.choices = get_args(item)
        self._as_tuple = origin is tuple
        self.scalar: type = str if self.choices or self.is_mapping else item
        if self.scalar not in (str, int, float, bool, Path):
            raise TypeError(f"no option can have the type {hint!r}")

    @property
    def is_switch(self) -> bool:
        return self.scalar is bool and not self.is_list

    @property
    def is_repeated(self) -> bool:
        """Whether the option is repeated on a command line, for one item each time."""
        return self.is_list or self.is_counts

    @property
    def metavar(self) -> str:
        if self.choices:
            return "|".join(self.choices)
        if self.is_mapping:
            return "NAME=N" if self.is_counts else "JSON"
        return {int: "N", float: "NUMBER", Path: "PATH"}.get(self.scalar, "TEXT")

    # -- from text

    def from_arguments(self, texts: Sequence[str]) -> Any:
        """The value of what a command line gives: one text, or one for each item."""
        if self.is_counts:
            return _unique_counts([_read_count(text) for text in texts])
        if self.is_list:
            return self._sequence([self._read_text(text) for text in texts])
        return self.from_text(texts[-1])

    def from_text(self, text: str) -> Any:
        """The value of a variable."""
        if self.is_repeated:
            if text.lstrip().startswith("{" if self.is_counts else "["):
                return self.from_data(_read_json(text, "JSON"))
            return self.from_arguments([line for line in text.splitlines() if line.strip()])
        if self.is_mapping:
            value = _read_json(text, "a JSON object")
            if not isinstance(value, dict):
                raise WrongValueError(text, "a JSON object")
            return value
        return self._read_text(text)

    def _read_text(self, text: str) -> Any:
        if self.choices:
            if text not in self.choices:
                raise WrongValueError(text, f"one of {', '.join(self.choices)}")
            return text
        if self.scalar is bool:
            if text.lower() not in _SWITCHES:
                raise WrongValueError(text, "yes or no")
            return _SWITCHES[text.lower()]
        if self.scalar is Path and not text:
            raise WrongValueError(text, "a path")
        if self.scalar in (int, float):
            return _read_number(self.scalar, text)
        return self.scalar(text)

    # -- from a file's value, and back

    def from_data(self, value: object) -> Any:
        """The value of what a YAML or TOML file has. Numbers may be texts there: YAML reads 1e-6 as one."""
        if value is None and self.is_optional:
            return None
        if self.is_mapping:
            if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
                raise WrongValueError(value, "an object")
            return _check_counts(value) if self.is_counts else value
        if self.is_list:
            if not isinstance(value, list):
                raise WrongValueError(value, "a list")
            return self._sequence([self._read_item(item) for item in value])
        return self._read_item(value)

    def _read_item(self, value: object) -> Any:
        if isinstance(value, str) and self.scalar is not bool:
            return self._read_text(value)
        if self.scalar is float and type(value) is int:
            return float(value)
        if type(value) is self.scalar and not (isinstance(value, float) and not math.isfinite(value)):
            return value
        expected = f"one of {', '.join(self.choices)}" if self.choices else _EXPECTED[self.scalar]
        raise WrongValueError(value, expected)

    def _sequence(self, items: list[Any]) -> list[Any] | tuple[Any, ...]:
        return tuple(items) if self._as_tuple else items


_EXPECTED: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path, as text",
}


def to_data(value: object) -> Any:
    """Plain data that a YAML file can have, which `from_data` reads back."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return [to_data(item) for item in value]
    return value


def _read_number(kind: type, text: str) -> Any:
    try:
        number = kind(text)
        if math.isfinite(number) and "_" not in text and text.isascii():
            return number
    except ValueError:
        pass
    raise WrongValueError(text, _EXPECTED[kind])


def _read_json(text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise WrongValueError(text, expected) from error


def _read_count(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition("=")
    if not name or not (number.isascii() and number.isdecimal()):
        raise WrongValueError(text, "NAME=N")
    return name, int(number)


def _unique_counts(pairs: Sequence[tuple[str, int]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, count in pairs:
        if counts.setdefault(name, count) != count:
            raise WrongValueError(f"{name}={count}", f"one number for {name}, not {counts[name]} too")
    return counts


def _check_counts(value: typing.Mapping[str, object]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, count in value.items():
        if type(count) is not int or count < 0:
            raise WrongValueError({name: count}, "a whole number for each name")
        counts[name] = count
    return counts
