"""The columns of exported samples, declared once; JSON lines and Parquet files are written and read by them.

A column has a name, the attribute of `Sample` that it holds, and a kind. A sample that was written and read
is equal to the original, media included. The data of a medium is written once in a file, in the first sample
that has it; later samples have its digest. `export/row_checks.py` says which values a row can have.

Files have all columns, whatever the samples: those that say where a sample comes from (ORIGIN_COLUMNS) are
null where that is not known. So files of one version can be read as one table, empty ones too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from branchline.core.errors import InputError
from branchline.core.message import Media, MediaKind
from branchline.core.sample import AnswerSpan, LogprobMeasurement, MeasurementKind, RewardSpan, Sample

ColumnKind = Literal[
    "text", "json", "texts", "integer", "number", "flag", "binary", "int8s", "int32s", "float32s", "struct",
    "structs",
]  # fmt: skip
"""`json` is the text of a JSON object, or empty; `int8s`, `int32s` and `float32s` are arrays."""


@dataclass(frozen=True)
class Column:
    """A column of exported samples, or a field of a struct in one."""

    name: str
    kind: ColumnKind
    attribute: str = ""
    """The attribute of a sample; by default it has the column's name."""
    fields: tuple[Column, ...] = ()
    """The fields of a struct."""
    is_nullable: bool = False
    least: int = 0
    """The smallest integer."""
    choices: tuple[str, ...] = ()
    """The texts that there are; empty if any is one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "attribute", self.attribute or self.name)


_MEASUREMENT = (
    Column("kind", "text", choices=get_args(MeasurementKind)),
    Column("measured_temperature", "number", is_nullable=True),
    Column("is_truncated", "flag", is_nullable=True),
    Column("temperature", "number", is_nullable=True),
    Column("top_p", "number", is_nullable=True),
    Column("top_k", "integer", is_nullable=True, least=-1),
    Column("min_p", "number", is_nullable=True),
    Column("presence_penalty", "number", is_nullable=True),
    Column("frequency_penalty", "number", is_nullable=True),
    Column("repetition_penalty", "number", is_nullable=True),
    Column("constraints", "texts"),
)
ORIGIN_COLUMNS = (
    Column("key", "text", is_nullable=True),
    Column("uid", "text", is_nullable=True),
    Column("group", "text", is_nullable=True),
    Column("agent_name", "text", is_nullable=True),
    Column("slot", "integer", is_nullable=True),
    Column("attempt", "integer", is_nullable=True),
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
    Column("reward", "number", is_nullable=True),
    Column(
        "rewards",
        "structs",
        fields=(
            Column("score", "number"),
            Column("start", "integer"),
            Column("end", "integer"),
            Column("call", "text"),
            Column("turn", "integer", is_nullable=True, least=1),
            Column("tool", "text"),
            Column("agent", "text"),
            Column("extras", "json"),
        ),
    ),
    Column(
        "media",
        "structs",
        fields=(
            Column("kind", "text", choices=get_args(MediaKind)),
            Column("digest", "text"),
            Column("url", "text"),
            Column("mime", "text"),
            Column("detail", "text"),
            Column("data", "binary", "payload"),
        ),
    ),
    Column(
        "answers",
        "structs",
        fields=(
            Column("start", "integer"),
            Column("end", "integer"),
            Column("call", "text"),
            Column("node", "integer", least=-1),
            Column("logprobs", "struct", fields=_MEASUREMENT),
        ),
    ),
    Column("reward_extras", "json"),
)
FILE_COLUMNS = ORIGIN_COLUMNS + SAMPLE_COLUMNS
"""The columns of files, in order."""
OPTIONAL_COLUMNS = frozenset({"rewards", "answers", "reward_extras", *(one.name for one in ORIGIN_COLUMNS)})
"""Columns that older files do not have."""
ARRAY_TYPES: dict[str, type[np.generic]] = {"int8s": np.int8, "int32s": np.int32, "float32s": np.float32}
STRUCT_TYPES: dict[str, type[RewardSpan | Media | AnswerSpan | LogprobMeasurement]] = {
    "rewards": RewardSpan,
    "media": Media,
    "answers": AnswerSpan,
    "logprobs": LogprobMeasurement,
}
LOWEST_FLOAT32 = np.finfo(np.float32).min
"""Stands for minus infinity, which JSON does not have."""


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
        return getattr(owner, column.attribute)


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
        if (media.payload or not media.url) and media.digest not in written_digests:
            written_digests.add(media.digest)
            fields["data"] = media.payload
        values.append(fields)
    return values
