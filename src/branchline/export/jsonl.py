"""Samples as JSON lines, one object per sample. A file is written completely or not at all.

The columns are those of `export/columns.py`. NaN is not JSON, so a missing logprob is null; minus infinity is
the lowest float32, which is read as minus infinity again. The data of an image is written in base64, once in
a file or response.
"""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from branchline.core.errors import InputError
from branchline.core.sample import DroppedTokens, ExportReport, Sample
from branchline.core.token_arrays import Floats
from branchline.export.columns import (
    ARRAY_TYPES,
    LOWEST_FLOAT32,
    ORIGIN_COLUMNS,
    SAMPLE_COLUMNS,
    Column,
    SampleRow,
    struct_values,
)
from branchline.export.row_checks import check_to_write, refuse
from branchline.export.row_reading import read_row


def row_to_json(row: SampleRow, written_digests: set[str] | None = None) -> dict[str, Any]:
    """Returns a line of a file: where the sample comes from, then the sample."""
    origin = {column.name: row.value(column) for column in ORIGIN_COLUMNS}
    return {**origin, **sample_to_json(row.sample, written_digests)}


def sample_to_json(
    sample: Sample, written_digests: set[str] | None = None, *, without: Collection[str] = ()
) -> dict[str, Any]:
    """Returns a sample as JSON values, without some columns. Media whose digests are in `written_digests` are
    written without their data; the digests of the others are added."""
    written = set() if written_digests is None else written_digests
    columns = [column for column in SAMPLE_COLUMNS if column.name not in without]
    return {column.name: _to_json(column, sample, written) for column in columns}


def _to_json(column: Column, sample: Sample, written_digests: set[str]) -> Any:
    if column.kind == "structs":
        structs = struct_values(column.name, sample, written_digests)
        for struct in structs:
            if column.name == "media":
                data = struct.pop("data")
                if data is not None:
                    struct["data"] = base64.b64encode(data).decode()
        return structs
    value = getattr(sample, column.attribute)
    if column.kind in ARRAY_TYPES:
        return floats_to_json(value) if column.kind == "float32s" else value.tolist()
    return list(value) if column.kind == "texts" else value


def floats_to_json(values: Floats) -> list[float | None]:
    """Returns numbers as JSON has them: null for NaN, the lowest float32 for minus infinity."""
    missing = np.isnan(values)
    numbers: list[float | None] = np.maximum(values, LOWEST_FLOAT32).tolist()
    for index in np.flatnonzero(missing).tolist():
        numbers[index] = None
    return numbers


def report_to_json(report: ExportReport) -> dict[str, Any]:
    """Returns a report as JSON values."""
    return {
        "samples": report.samples,
        "sampled_tokens": report.sampled_tokens,
        "trained_tokens": report.trained_tokens,
        "inexact_tokens": report.inexact_tokens,
        "missing_logprobs": report.missing_logprobs,
        "unassigned_rewards": report.unassigned_rewards,
        "not_applied": dict(report.not_applied),
        "unnamed_conversations": report.unnamed_conversations,
        "dropped": [
            {"reason": dropped.reason, "call": dropped.call, "tokens": dropped.tokens}
            for dropped in report.dropped
        ],
    }


def report_from_json(raw: Mapping[str, Any]) -> ExportReport:
    """Returns the report that `report_to_json` wrote."""
    return ExportReport(**{**raw, "dropped": tuple([DroppedTokens(**entry) for entry in raw["dropped"]])})


def write_jsonl(samples: Iterable[Sample | SampleRow], path: str | os.PathLike[str]) -> int:
    """Writes samples to a file and returns their number. Raises InputError, with sample and column, for one
    that would not be read back equal. If an error occurs, the old file is unchanged."""
    count = 0
    written_digests: set[str] = set()
    with replace_file(path) as file:
        for sample in samples:
            file.write(msgspec.json.encode(row_to_json(check_to_write(sample), written_digests)) + b"\n")
            count += 1
    return count


@contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yields a file that takes the place of `path` when the block ends; if it raises, `path` is unchanged."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent or Path(), prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        # mkstemp creates a file that only its owner can read; give it the usual permissions.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """Yields the samples of a file written by `write_jsonl`, with the payloads of their media."""
    return (row.sample for row in read_jsonl_rows(path))


def read_jsonl_rows(path: str | os.PathLike[str]) -> Iterator[SampleRow]:
    """Does what `read_jsonl` does, and says where each sample comes from. Raises InputError, with the number
    of the line, for one that is no sample."""
    payloads: dict[str, bytes] = {}
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = _read_json_row(msgspec.json.decode(line), payloads)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise InputError(
                    f"{path}:{number}: got {line[:80]!r}, expected a sample as JSON: {error}"
                ) from error
            except InputError as error:
                raise InputError(f"{path}:{number}: {error}") from error
            yield row


def sample_from_json(raw: Mapping[str, Any], payloads: dict[str, bytes] | None = None) -> Sample:
    """Returns the sample that `sample_to_json` wrote. `payloads` are those of the samples before it, by
    digest; the sample's own are added. Raises InputError for what is no sample."""
    return _read_json_row(raw, {} if payloads is None else payloads).sample


def _read_json_row(raw: object, payloads: dict[str, bytes]) -> SampleRow:
    if not isinstance(raw, Mapping):
        raise InputError(f"got {str(raw)[:80]}, expected a sample, which is an object")
    media = raw.get("media")
    if not isinstance(media, list):
        return read_row(raw, payloads)
    return read_row({**raw, "media": [_decode_data(one, index) for index, one in enumerate(media)]}, payloads)


def _decode_data(media: object, index: int) -> object:
    """Returns a medium with its data as bytes."""
    if not isinstance(media, Mapping) or media.get("data") is None:
        return media
    data = media["data"]
    try:
        return {**media, "data": base64.b64decode(data, validate=True)}
    except (TypeError, ValueError):
        refuse(f"media[{index}].data", data, "a text in base64")
