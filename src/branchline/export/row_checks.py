"""What a sample is: the one statement that writers and readers of rows ask.

    types      each column has the type that `export/columns.py` gives it; arrays have one length
    tokens     ids from 0 on; the mask is 0 or 1; where it is 0, share and logprob are 0 and the version is
               -1; shares are from 0 to 1, logprobs at most 0 (or NaN: without one)
    counts     no more tokens without logprobs, or after other ids, than are trained; `exact` if no token is
               after other ids
    answers    in order, within the row, and exactly the trained tokens (older files have none)
    rewards    within the row
    media      one digest has one content

So what is written is read back equal, and what is read is what an export writes.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from branchline.core.errors import InputError
from branchline.core.sample import Sample
from branchline.export.columns import (
    ARRAY_TYPES,
    LOWEST_FLOAT32,
    ORIGIN_COLUMNS,
    SAMPLE_COLUMNS,
    STRUCT_TYPES,
    Column,
    SampleRow,
)
from branchline.timelines.timeline import NO_VERSION

_ROUNDING = 0.01
"""How far rounding may lift a logprob above 0."""
_MAX_EXACT = 2**53
"""Whole numbers up to this are exact as floats."""
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "text": ((str,), "a text"),
    "json": ((str,), "the text of a JSON object, or an empty text"),
    "integer": ((int,), "an integer"),
    "number": ((float, int), "a finite number"),
    "flag": ((bool,), "true or false"),
    "binary": ((bytes,), "bytes"),
}


def check_to_write(sample: Sample | SampleRow) -> SampleRow:
    """Returns a sample as a row. Raises InputError, with sample and column, if it would not be read back."""
    row = sample if isinstance(sample, SampleRow) else SampleRow(sample)
    if not isinstance(row.sample, Sample):
        raise InputError(f"samples: got {_show(row.sample)}, expected a Sample")
    try:
        check_row(row)
    except InputError as error:
        name = row.origin.key or f"of session {row.sample.session!r}"
        raise InputError(f"sample {name}: {error}") from None
    return row


def check_row(row: SampleRow) -> None:
    """Raises InputError, with column, value and expectation, for what is no row."""
    for column in ORIGIN_COLUMNS:
        _check_value(column, getattr(row.origin, column.name), "")
    sample = row.sample
    for column in SAMPLE_COLUMNS:
        value = getattr(sample, column.attribute)
        if column.kind in ARRAY_TYPES:
            _check_array(column, value, sample)
        elif column.kind == "structs":
            if type(value) is not tuple:
                refuse(column.name, value, "a tuple")
            for index, struct in enumerate(value):
                _check_struct(column, struct, f"{column.name}[{index}].")
        else:
            _check_value(column, value, "")
    is_trained = _check_tokens(sample)
    _check_counts(sample, int(np.count_nonzero(is_trained)))
    _check_spans(sample, is_trained)
    _check_media(sample)


def refuse(name: str, got: object, expected: str) -> NoReturn:
    raise InputError(f"{name}: got {_show(got)}, expected {expected}")


def refuse_first(name: str, array: NDArray[Any], is_strange: NDArray[np.bool_], expected: str) -> NoReturn:
    index = int(np.flatnonzero(is_strange)[0])
    refuse(f"{name}[{index}]", array[index].item(), expected)


def _show(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"


# -- types ------------------------------------------------------------------------------------------------


def _check_struct(column: Column, struct: object, prefix: str) -> None:
    expected = STRUCT_TYPES[column.name]
    if not isinstance(struct, expected):
        refuse(prefix.removesuffix("."), struct, expected.__name__)
    for entry in column.fields:
        value = getattr(struct, entry.attribute)
        if entry.kind == "struct":
            _check_struct(entry, value, f"{prefix}{entry.name}.")
        else:
            _check_value(entry, value, prefix)


def _check_value(column: Column, value: Any, prefix: str) -> None:
    """Checks a value that is no array and no struct."""
    kind = column.kind
    if kind == "texts":
        if type(value) is not tuple:
            refuse(prefix + column.name, value, "a tuple of texts")
        for index, text in enumerate(value):
            if type(text) is not str:
                refuse(f"{prefix}{column.name}[{index}]", text, "a text")
            _check_text(text, prefix + column.name)
        return
    if value is None and column.is_nullable:
        return
    types, expected = _TYPES[kind]
    if type(value) not in types:
        refuse(prefix + column.name, value, expected + (" or null" if column.is_nullable else ""))
    if kind == "text":
        _check_text(value, prefix + column.name)
        if column.choices and value not in column.choices:
            refuse(prefix + column.name, value, f"one of {', '.join(column.choices)}")
    elif kind == "integer":
        if not column.least <= value < 2**63:
            refuse(prefix + column.name, value, f"an integer of {column.least} or more")
    elif kind == "number":
        if abs(value) > _MAX_EXACT if type(value) is int else not math.isfinite(value):
            refuse(prefix + column.name, value, expected)
    elif kind == "json" and value:
        _check_text(value, prefix + column.name)
        try:
            msgspec.json.decode(value, type=dict)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            refuse(prefix + column.name, value, expected)


def _check_text(text: str, name: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            refuse(name, text, "Unicode without lone surrogates")


def _check_array(column: Column, array: object, sample: Sample) -> None:
    expected = ARRAY_TYPES[column.kind]
    if not isinstance(array, np.ndarray):
        refuse(column.name, array, f"an array of {np.dtype(expected)}")
    if array.dtype != expected:
        raise InputError(
            f"{column.name}: got an array of {array.dtype}, expected one of {np.dtype(expected)}"
        )
    if array.ndim != 1:
        raise InputError(f"{column.name}: got {array.ndim} axes, expected one")
    if column.name != "prompt_ids" and len(array) != len(sample.response_ids):
        count = len(sample.response_ids)
        raise InputError(f"{column.name}: got {len(array)} values, expected {count}, as many as response_ids")


# -- tokens -----------------------------------------------------------------------------------------------


def _check_tokens(sample: Sample) -> NDArray[np.bool_]:
    """Returns which tokens are trained."""
    mask, shares, logprobs = sample.response_mask, sample.shares, sample.response_logprobs
    versions = sample.response_versions
    for name, ids in (("prompt_ids", sample.prompt_ids), ("response_ids", sample.response_ids)):
        _refuse_any(ids < 0, name, ids, "ids from 0 on")
    is_context: NDArray[np.bool_] = mask == 0
    is_trained: NDArray[np.bool_] = mask == 1
    _refuse_any(~(is_context | is_trained), "response_mask", mask, "0 and 1")
    _refuse_any(~((shares >= 0) & (shares <= 1)), "shares", shares, "numbers from 0 to 1")
    expected = "numbers up to 0, minus infinity, or NaN (null in JSON)"
    too_large = logprobs > _ROUNDING
    _refuse_any(too_large | (logprobs == LOWEST_FLOAT32), "response_logprobs", logprobs, expected)
    _refuse_any(versions < NO_VERSION, "response_versions", versions, f"versions from {NO_VERSION} on")
    for name, values, neutral in (
        ("shares", shares, 0),
        ("response_logprobs", logprobs, 0),
        ("response_versions", versions, NO_VERSION),
    ):
        _refuse_any(is_context & (values != neutral), name, values, f"{neutral} where response_mask is 0")
    return is_trained


def _refuse_any(is_strange: NDArray[np.bool_], name: str, array: NDArray[Any], expected: str) -> None:
    if np.count_nonzero(is_strange):
        refuse_first(name, array, is_strange, expected)


def _check_counts(sample: Sample, trained: int) -> None:
    logprobs = sample.response_logprobs
    missing = int(np.count_nonzero(logprobs != logprobs))
    if not missing <= sample.missing_logprobs <= trained:
        expected = f"a number from {missing}, the tokens without one, to {trained}, the trained tokens"
        refuse("missing_logprobs", sample.missing_logprobs, expected)
    if sample.inexact_tokens > trained:
        refuse("tokens_behind_other_ids", sample.inexact_tokens, f"at most {trained}, the trained tokens")
    if sample.exact != (sample.inexact_tokens == 0):
        expected = f"{not sample.exact}, as tokens_behind_other_ids is {sample.inexact_tokens}"
        refuse("exact", sample.exact, expected)


def _check_spans(sample: Sample, is_trained: NDArray[np.bool_]) -> None:
    count, end = len(sample.response_ids), 0
    for index, reward in enumerate(sample.rewards):
        if not reward.start <= reward.end <= count:
            expected = f"a part of the row's {count} response_ids"
            refuse(f"rewards[{index}]", (reward.start, reward.end), expected)
    if not sample.answers:
        return
    is_answer = np.zeros(count, np.bool_)
    for index, answer in enumerate(sample.answers):
        if not end <= answer.start < answer.end <= count:
            expected = f"a part of the row's {count} response_ids, from {end} on"
            refuse(f"answers[{index}]", (answer.start, answer.end), expected)
        end = answer.end
        is_answer[answer.start : end] = True
    expected = "1 in the answers of the row, and 0 elsewhere"
    _refuse_any(is_answer != is_trained, "response_mask", sample.response_mask, expected)


def _check_media(sample: Sample) -> None:
    """A file has the data of a digest once."""
    payloads: dict[str, bytes] = {}
    for index, media in enumerate(sample.media):
        if payloads.setdefault(media.digest, media.payload) != media.payload:
            refuse(f"media[{index}].data", media.payload, f"the data that {media.digest!r} has before")
