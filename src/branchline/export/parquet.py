"""Samples as a Parquet file, one row per sample. A file is written completely or not at all.

The columns are those of `export/columns.py`: ids and versions are `list<int32>`, masks `list<int8>`, logprobs
and shares `list<float32>`, where a missing logprob is NaN. `datasets.load_dataset("parquet", ...)` reads the
file; so does everything that reads Arrow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from branchline.core.errors import InputError
from branchline.core.extras import requires_extra
from branchline.core.sample import Sample
from branchline.export.columns import (
    ARRAY_TYPES,
    FILE_COLUMNS,
    OPTIONAL_COLUMNS,
    Column,
    SampleRow,
    check_columns,
    struct_values,
)
from branchline.export.jsonl import replace_file
from branchline.export.row_checks import check_to_write
from branchline.export.row_reading import read_row

with requires_extra():
    import pyarrow as pa
    import pyarrow.parquet as pq

_ROWS_PER_GROUP, _TOKENS_PER_GROUP = 1000, 4_000_000
"""A row group is complete when it has this many rows or tokens."""
_SCALAR_TYPES = {
    "text": pa.string(),
    "json": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "flag": pa.bool_(),
    "binary": pa.binary(),
    "texts": pa.list_(pa.string()),
    "int8s": pa.list_(pa.int8()),
    "int32s": pa.list_(pa.int32()),
    "float32s": pa.list_(pa.float32()),
}


def write_parquet(samples: Iterable[Sample | SampleRow], path: str | os.PathLike[str]) -> int:
    """Writes samples to a file and returns their number. Raises InputError, with sample and column, for one
    that would not be read back equal. If an error occurs, the old file is unchanged."""
    count = 0
    written_digests: set[str] = set()
    with replace_file(path) as file, pq.ParquetWriter(file, PARQUET_SCHEMA, compression="zstd") as writer:
        for group in _row_groups(samples):
            arrays = [_to_arrow(column, group, written_digests) for column in FILE_COLUMNS]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=PARQUET_SCHEMA))
            count += len(group)
    return count


def read_parquet(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """Yields the samples of a file written by `write_parquet`, with the payloads of their media. Raises
    InputError for a file without their columns."""
    return (row.sample for row in read_parquet_rows(path))


def read_parquet_rows(path: str | os.PathLike[str]) -> Iterator[SampleRow]:
    """Does what `read_parquet` does, and says where each sample comes from. Raises InputError, with the
    number of the row from 1 on, for one that is no sample."""
    payloads: dict[str, bytes] = {}
    try:
        file = pq.ParquetFile(Path(path))
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: got a file that cannot be read ({error}), expected Parquet") from error
    with file:
        columns = [column for column in FILE_COLUMNS if column.name in file.schema_arrow.names]
        missing = {column.name for column in FILE_COLUMNS} - {column.name for column in columns}
        if missing - OPTIONAL_COLUMNS:
            names = ", ".join(sorted(missing - OPTIONAL_COLUMNS))
            raise InputError(f"{path}: got no column {names}, expected the columns of samples")
        number = 0
        for batch in file.iter_batches(_ROWS_PER_GROUP, columns=[column.name for column in columns]):
            try:
                values = [_from_arrow(one, batch.column(one.name)) for one in columns]
            except InputError as error:
                raise InputError(f"{path}: {error}") from error
            for row in zip(*values, strict=True):
                number += 1
                raw = {column.name: value for column, value in zip(columns, row, strict=True)}
                try:
                    yield read_row(raw, payloads)
                except InputError as error:
                    raise InputError(f"{path}: row {number}: {error}") from error


def open_part(path: str | os.PathLike[str]) -> list[str]:
    """Returns the session of each sample of a file to which other files are added. Raises InputError for
    one with other columns or types: they could not be read as one table."""
    try:
        schema = pq.read_schema(Path(path))
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: got a file that cannot be read ({error}), expected Parquet") from error
    check_columns(str(path), schema.names)
    for field in PARQUET_SCHEMA:
        if schema.field(field.name).type != field.type:
            raise InputError(
                f"{path}: {field.name}: got {schema.field(field.name).type}, expected {field.type}: "
                "continue in another folder"
            )
    sessions: list[str] = pq.read_table(Path(path), columns=["session"]).column("session").to_pylist()
    return sessions


def _row_groups(samples: Iterable[Sample | SampleRow]) -> Iterator[list[SampleRow]]:
    group: list[SampleRow] = []
    tokens = 0
    for sample in samples:
        row = check_to_write(sample)
        group.append(row)
        tokens += len(row.sample)
        if len(group) == _ROWS_PER_GROUP or tokens >= _TOKENS_PER_GROUP:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _arrow_type(column: Column) -> pa.DataType:
    if column.kind in _SCALAR_TYPES:
        return _SCALAR_TYPES[column.kind]
    struct = pa.struct([pa.field(entry.name, _arrow_type(entry)) for entry in column.fields])
    return struct if column.kind == "struct" else pa.list_(struct)


PARQUET_SCHEMA = pa.schema([pa.field(column.name, _arrow_type(column)) for column in FILE_COLUMNS])


def _to_arrow(column: Column, rows: Sequence[SampleRow], written_digests: set[str]) -> pa.Array:
    values: list[Any]
    if column.kind == "structs":
        values = [struct_values(column.name, row.sample, written_digests) for row in rows]
    else:
        values = [row.value(column) for row in rows]
    if column.kind not in ARRAY_TYPES:
        return pa.array(values, _arrow_type(column))
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    flat = np.concatenate(values).astype(ARRAY_TYPES[column.kind], copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _from_arrow(column: Column, array: pa.Array) -> Sequence[Any]:
    """The values of a column; arrays are not narrowed. Raises InputError for a column of another type."""
    if column.kind not in ARRAY_TYPES:
        values: list[Any] = array.to_pylist()
        return values
    kind, expected = array.type, _arrow_type(column)
    if pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.list_(kind.value_type))
    elif pa.types.is_null(kind) or (hasattr(kind, "value_type") and pa.types.is_null(kind.value_type)):
        array = array.cast(expected)
    elif not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        raise InputError(f"{column.name}: got {kind}, expected {expected}")
    item = array.type.value_type
    if not (pa.types.is_integer(item) or (column.kind == "float32s" and pa.types.is_floating(item))):
        raise InputError(f"{column.name}: got {kind}, expected {expected}")
    flat = array.values
    if array.null_count or flat.null_count:
        lists: list[Any] = array.to_pylist()
        return lists
    numbers = flat.to_numpy().copy()
    return [numbers[start:end] for start, end in pairwise(array.offsets.to_numpy())]
