"""The columns of exported samples, declared once; JSON lines and Parquet files are written and read by them.

A column has a name, the attribute of `Sample` that it holds, and a kind. A sample that was written and read
is equal to the original, media included. The data of a medium is written once in a file, in the first sample
that has it; later samples have its digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

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
OPTIONAL_COLUMNS = frozenset({"rewards", "answers", "reward_extras"})
"""Columns that older files do not have."""
ARRAY_TYPES: dict[str, type[np.generic]] = {"int8s": np.int8, "int32s": np.int32, "float32s": np.float32}


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
        if column.name not in OPTIONAL_COLUMNS or column.name in row
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
