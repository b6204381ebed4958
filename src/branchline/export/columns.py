"""The columns of exported samples, declared once; JSON lines and Parquet files are written and read by them.

A column has a name, the attribute of `Sample` that it holds, and a kind. A sample that was written and read
is equal to the original, media included. The data of a medium is written once in a file, in the first sample
that has it; later samples have its digest. What a file cannot hold is refused, by sample and column.

Files have all columns, whatever the samples: those that say where a sample comes from (ORIGIN_COLUMNS) are
null where that is not known. So files of one version can be read as one table, empty ones too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import msgspec
import numpy as np

from branchline.core.errors import InputError
from branchline.core.message import Media
from branchline.core.sample import AnswerSpan, LogprobMeasurement, RewardSpan, Sample

ColumnKind = Literal[
    "text", "texts", "integer", "number", "flag", "binary", "int8s", "int32s", "float32s", "struct", "structs"
]
"""`int8s`, `int32s` and `float32s` are arrays; `integer`, `number` and `flag` may be null."""


@dataclass(frozen=True)
class Column:
    """A column of exported samples, or a field of a struct in one."""

    name: str
    kind: ColumnKind
    attribute: str = ""
    """The attribute of a sample; empty if it has the column's name."""
    fields: tuple[Column, ...] = ()
    """The fields of a struct."""

    @property
    def sample_attribute(self) -> str:
        return self.attribute or self.name


_MEASUREMENT = (
    Column("kind", "text"),
    Column("measured_temperature", "number"),
    Column("is_truncated", "flag"),
    Column("temperature", "number"),
    Column("top_p", "number"),
    Column("top_k", "integer"),
    Column("min_p", "number"),
    Column("presence_penalty", "number"),
    Column("frequency_penalty", "number"),
    Column("repetition_penalty", "number"),
    Column("constraints", "texts"),
)
ORIGIN_COLUMNS = (
    Column("key", "text"),
    Column("uid", "text"),
    Column("group", "text"),
    Column("agent_name", "text"),
    Column("slot", "integer"),
    Column("attempt", "integer"),
)
"""Which task and session of a run a sample is from: the fields of SampleOrigin."""
SAMPLE_COLUMNS = (
    Column("session", "text"),
    Column("agent", "text"),
    Column("calls", "texts"),
    Column("prompt_ids", "int32s"),
    Column("response_ids", "int32s"),
    Column("response_mask", "int8s"),
    Column("response_logprobs", "float32s"),
    Column("response_versions", "int32s"),
    Column("shares", "float32s"),
    Column("finish", "text", "finish_reason"),
    Column("exact", "flag"),
    Column("tokens_behind_other_ids", "integer", "inexact_tokens"),
    Column("missing_logprobs", "integer"),
    Column("truncated_tokens", "integer"),
    Column("reward", "number"),
    Column(
        "rewards",
        "structs",
        fields=(
            Column("score", "number"),
            Column("start", "integer"),
            Column("end", "integer"),
            Column("call", "text"),
            Column("turn", "integer"),
            Column("tool", "text"),
            Column("agent", "text"),
            Column("extras", "text"),
        ),
    ),
    Column(
        "media",
        "structs",
        fields=(
            Column("kind", "text"),
            Column("digest", "text"),
            Column("url", "text"),
            Column("mime", "text"),
            Column("detail", "text"),
            Column("data", "binary"),
        ),
    ),
    Column(
        "answers",
        "structs",
        fields=(
            Column("start", "integer"),
            Column("end", "integer"),
            Column("call", "text"),
            Column("node", "integer"),
            Column("logprobs", "struct", fields=_MEASUREMENT),
        ),
    ),
    Column("reward_extras", "text"),
)
FILE_COLUMNS = ORIGIN_COLUMNS + SAMPLE_COLUMNS
"""The columns of files, in order."""
OPTIONAL_COLUMNS = frozenset({"rewards", "answers", "reward_extras", *(one.name for one in ORIGIN_COLUMNS)})
"""Columns that older files do not have."""
ARRAY_TYPES: dict[str, type[np.generic]] = {"int8s": np.int8, "int32s": np.int32, "float32s": np.float32}

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "text": ((str,), "a text"),
    "integer": ((int,), "an integer"),
    "number": ((int, float), "a number"),
    "flag": ((bool,), "true or false"),
}


@dataclass(frozen=True)
class SampleOrigin:
    """Which task and session of a run a sample is from; None is not known."""

    key: str | None = None
    """The sample's name."""
    uid: str | None = None
    """The task."""
    group: str | None = None
    """The sessions that are compared with each other."""
    agent_name: str | None = None
    """The agent that the task names; `agent` is the one that sampled."""
    slot: int | None = None
    """Which of the task's sessions, from 0 on."""
    attempt: int | None = None
    """Which attempt at the session, from 0 on."""


@dataclass(frozen=True)
class SampleRow:
    """A sample as a row of a file."""

    sample: Sample
    origin: SampleOrigin = SampleOrigin()

    def value(self, column: Column) -> Any:
        """The value of a column that is not of structs."""
        owner = self.origin if column in ORIGIN_COLUMNS else self.sample
        return getattr(owner, column.sample_attribute)

    def check(self) -> SampleRow:
        """Returns the row. Raises InputError, with sample and column, for what would not be read back equal:
        an array of another type or length, a text that is no Unicode, a number that is not finite."""
        for column in FILE_COLUMNS:
            if column.kind == "structs":
                value: Any = msgspec.to_builtins(getattr(self.sample, column.name), builtin_types=(bytes,))
            else:
                value = self.value(column)
            expected = ARRAY_TYPES.get(column.kind)
            if expected is None:
                self._check_values(column.name, value)
            elif len(value) and value.dtype != expected:
                self._refuse(column.name, f"an array of {value.dtype}", f"one of {np.dtype(expected)}")
            elif column.name != "prompt_ids" and len(value) != len(self.sample.response_ids):
                count = len(self.sample.response_ids)
                self._refuse(column.name, f"{len(value)} values", f"{count}, as many as response_ids")
        return self

    def check_values(self) -> SampleRow:
        """Returns the row. Raises InputError, with sample and column, for values that no export writes."""
        sample = self.sample
        for column in FILE_COLUMNS:
            types, expected = _TYPES.get(column.kind, ((), ""))
            value = self.value(column) if types else None
            may_be_null = column in ORIGIN_COLUMNS or column.name == "reward"
            if types and type(value) not in types and not (value is None and may_be_null):
                self._refuse(column.name, repr(value), expected)
        for name, ids in (("prompt_ids", sample.prompt_ids), ("response_ids", sample.response_ids)):
            if (ids < 0).any():
                self._refuse(name, "a negative id", "ids from 0 on")
        if not np.isin(sample.response_mask, (0, 1)).all():
            self._refuse("response_mask", repr(sample.response_mask.tolist())[:80], "0 and 1")
        return self

    def _check_values(self, name: str, value: object) -> None:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                self._refuse(name, repr(value), "Unicode without lone surrogates")
        elif isinstance(value, float) and not math.isfinite(value):
            self._refuse(name, repr(value), "a finite number")
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._check_values(f"{name}.{key}", item)
        elif isinstance(value, list | tuple):
            for item in value:
                self._check_values(name, item)

    def _refuse(self, column: str, got: str, expected: str) -> NoReturn:
        name = self.origin.key or f"of session {self.sample.session!r}"
        raise InputError(f"sample {name}: {column}: got {got}, expected {expected}")


def as_row(sample: Sample | SampleRow) -> SampleRow:
    return sample if isinstance(sample, SampleRow) else SampleRow(sample)


def make_origin(row: Mapping[str, Any]) -> SampleOrigin:
    """Returns the origin in a row that was read; older files and other rows have none."""
    return SampleOrigin(**{column.name: row.get(column.name) for column in ORIGIN_COLUMNS})


def check_columns(place: str, names: Collection[str]) -> None:
    """Raises InputError, with the columns that differ, unless rows can be added to a file with these."""
    expected = {column.name for column in FILE_COLUMNS}
    missing, other = sorted(expected - set(names)), sorted(set(names) - expected)
    if missing or other:
        problems = [f"no column {', '.join(missing)}"] if missing else []
        problems += [f"another column, {', '.join(other)}"] if other else []
        raise InputError(
            f"{place}: got {' and '.join(problems)}, expected the columns of this version: "
            "continue in another folder"
        )


def struct_values(name: str, sample: Sample, written_digests: set[str]) -> list[dict[str, Any]]:
    """Returns the value of a column of structs. Media whose digests are in `written_digests` have no data;
    the digests of the others are added."""
    if name != "media":
        values: list[dict[str, Any]] = msgspec.to_builtins(getattr(sample, name))
        return list(values)
    values = []
    for media in sample.media:
        fields: dict[str, Any] = {
            "kind": media.kind,
            "digest": media.digest,
            "url": media.url,
            "mime": media.mime,
            "detail": media.detail,
            "data": None,
        }
        if media.payload and media.digest not in written_digests:
            written_digests.add(media.digest)
            fields["data"] = media.payload
        values.append(fields)
    return values


def make_sample(row: Mapping[str, Any], payloads: dict[str, bytes]) -> Sample:
    """Returns the sample of a row whose arrays are arrays and whose binary values are bytes. `payloads` are
    the media of the rows before it by digest; its own are added."""
    values = {
        column.sample_attribute: row[column.name]
        for column in SAMPLE_COLUMNS
        if column.name not in OPTIONAL_COLUMNS or row.get(column.name) is not None
    }
    for media in row["media"]:
        if media.get("data"):
            payloads[media["digest"]] = media["data"]
    values["media"] = tuple(
        Media(
            media["kind"],
            media["digest"],
            payloads.get(media["digest"], b""),
            url=media["url"],
            mime=media.get("mime", ""),
            detail=media.get("detail", ""),
        )
        for media in row["media"]
    )
    values["calls"] = tuple(row["calls"])
    values["rewards"] = tuple(RewardSpan(**reward) for reward in row.get("rewards", ()))
    values["answers"] = tuple(
        AnswerSpan(**{**answer, "logprobs": LogprobMeasurement(**answer["logprobs"])})
        for answer in row.get("answers", ())
    )
    return Sample(**values)
