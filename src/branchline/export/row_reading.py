"""Makes rows of what a file or a response has: values by column, as decoded from JSON or from Arrow.

Nothing is converted but what a format cannot tell apart: integers are numbers, wider arrays are arrays, and
the lowest float32 is minus infinity. Every row is checked (`export/row_checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from branchline.core.errors import InputError
from branchline.core.message import Media
from branchline.core.sample import Sample
from branchline.export.columns import (
    ARRAY_TYPES,
    LOWEST_FLOAT32,
    OPTIONAL_COLUMNS,
    ORIGIN_COLUMNS,
    SAMPLE_COLUMNS,
    STRUCT_TYPES,
    Column,
    SampleOrigin,
    SampleRow,
)
from branchline.export.row_checks import check_row, refuse, refuse_first

_REQUIRED_FIELDS = {
    "rewards": frozenset({"score", "start", "end"}),
    "media": frozenset({"kind", "digest"}),
    "answers": frozenset({"start", "end", "call", "node", "logprobs"}),
    "logprobs": frozenset[str](),
}
"""What older files have, too."""


def read_row(raw: Mapping[str, Any], payloads: dict[str, bytes]) -> SampleRow:
    """Returns a row whose binary values are bytes. `payloads` are those of the media of the rows before it,
    by digest; the row's own are added. Raises InputError, with column, value and expectation, for what is
    no row."""
    if missing := sorted({column.name for column in SAMPLE_COLUMNS} - OPTIONAL_COLUMNS - raw.keys()):
        raise InputError(f"got no column {', '.join(missing)}, expected a sample with all its columns")
    values: dict[str, Any] = {}
    for column in SAMPLE_COLUMNS:
        value = raw.get(column.name)
        if value is None and column.name in OPTIONAL_COLUMNS:
            continue
        if column.name == "media":
            values["media"] = tuple(_read_media(column, value, payloads))
        else:
            values[column.attribute] = _read_value(column, value, "")
    origin = SampleOrigin(**{column.name: raw.get(column.name) for column in ORIGIN_COLUMNS})
    row = SampleRow(Sample(**values), origin)
    check_row(row)
    return row


def _read_value(column: Column, value: Any, prefix: str) -> Any:
    name = prefix + column.name
    if column.kind in ARRAY_TYPES:
        return _read_array(column, value)
    if column.kind == "structs":
        return tuple(
            STRUCT_TYPES[column.name](**_read_struct(column, struct, f"{name}[{index}]"))
            for index, struct in enumerate(_read_list(value, name, "a list of objects"))
        )
    if column.kind == "struct":
        return STRUCT_TYPES[column.name](**_read_struct(column, value, name))
    if column.kind == "texts":
        return tuple(_read_list(value, name, "a list of texts"))
    if column.kind == "number" and type(value) is int and abs(value) <= 2**53:
        return float(value)
    return value


def _read_list(value: object, name: str, expected: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        refuse(name, value, expected)
    return value


def _read_struct(column: Column, struct: object, name: str) -> dict[str, Any]:
    """Returns the fields of a struct; those that older files do not have are left out."""
    if not isinstance(struct, Mapping):
        refuse(name, struct, "an object")
    known = {entry.name: entry for entry in column.fields}
    for other in struct.keys() - known.keys():
        refuse(f"{name}.{other}", struct[other], f"one of the fields {', '.join(known)}")
    if missing := [key for key in known if key in _REQUIRED_FIELDS[column.name] - struct.keys()]:
        raise InputError(f"{name}: got no {', '.join(missing)}, expected the fields {', '.join(known)}")
    return {key: _read_value(known[key], value, f"{name}.") for key, value in struct.items()}


def _read_media(column: Column, value: object, payloads: dict[str, bytes]) -> list[Media]:
    """Returns media with their data, which stand in this row or in one before it."""
    found: list[Media] = []
    for index, raw in enumerate(_read_list(value, "media", "a list of objects")):
        struct = _read_struct(column, raw, f"media[{index}]")
        data, digest = struct.pop("data", None), struct["digest"]
        if not isinstance(digest, str):
            refuse(f"media[{index}].digest", digest, "a text")
        if data is not None and payloads.setdefault(digest, data) != data:
            refuse(f"media[{index}].data", data, f"the data that a row before has for {digest!r}")
        if digest not in payloads and not struct.get("url"):
            refuse(f"media[{index}].data", None, f"the data of {digest!r}, in this row or in one before it")
        found.append(Media(payload=payloads.get(digest, b""), **struct))
    return found


def _read_array(column: Column, values: object) -> NDArray[Any]:
    target = np.dtype(ARRAY_TYPES[column.kind])
    array: NDArray[Any] = values if isinstance(values, np.ndarray) else _list_to_array(column, values)
    if column.kind == "float32s":
        with np.errstate(over="ignore"):
            narrow = array.astype(target, copy=False)
        if narrow is not array and (lost := np.isinf(narrow) & np.isfinite(array)).any():
            refuse_first(column.name, array, lost, _expected(column))
        if (lowest := narrow == LOWEST_FLOAT32).any():
            narrow = np.where(lowest, np.float32(-np.inf), narrow)
        return narrow
    if array.dtype != target:
        limits = np.iinfo(target.type)
        if (lost := (array < limits.min) | (array > limits.max)).any():
            refuse_first(column.name, array, lost, _expected(column))
    return array.astype(target, copy=False)


def _list_to_array(column: Column, raw: object) -> NDArray[Any]:
    values = _read_list(raw, column.name, _expected(column))
    is_float = column.kind == "float32s"
    allowed: set[type] = {int, float, type(None)} if is_float else {int}
    if not set(map(type, values)) <= allowed:
        index = next(index for index, value in enumerate(values) if type(value) not in allowed)
        refuse(f"{column.name}[{index}]", values[index], _expected(column))
    if is_float and None in values:
        values = [np.nan if value is None else value for value in values]
    try:
        return np.array(values, np.float64 if is_float else np.int64)
    except OverflowError:
        index = next(index for index, value in enumerate(values) if abs(value) >= 2**63)
        refuse(f"{column.name}[{index}]", values[index], _expected(column))


def _expected(column: Column) -> str:
    name = np.dtype(ARRAY_TYPES[column.kind])
    return f"a list of numbers or null, as {name}" if column.kind == "float32s" else f"a list of {name}"
