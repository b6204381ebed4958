"""Reads which samples a client of the control API asks for: the fields of ExportPolicy, `include_aborted`
and `keep_call`.

The same fields are the query of `GET /samples` and `GET /report` (`?shares=first&drop=retry&drop=edit`) and
the `policy` of `POST /finalize`. Fields that are not given keep the session's defaults. A name or a value
that is not known is refused, because a sample that was not asked for looks like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import msgspec

from branchline.core.errors import ExportError, InputError, MessageError
from branchline.export.samples import Export, ExportPolicy, SampleStream
from branchline.runtime.call_record import attempts_of
from branchline.runtime.managed_session import ManagedSession

SampleFormat = Literal["json", "jsonl", "tree"]
_JSONL_TYPES = ("application/jsonl", "application/x-ndjson", "application/x-jsonlines")


def read_sample_format(params: Sequence[tuple[str, str]], accept: str) -> SampleFormat:
    """The format of `GET /samples`: the parameter `format`, else JSON lines if the client accepts them."""
    formats = [value for name, value in params if name == "format"]
    if not formats:
        accepted = [kind.partition(";")[0].strip().lower() for kind in accept.split(",")]
        return "jsonl" if any(kind in _JSONL_TYPES for kind in accepted) else "json"
    for known in get_args(SampleFormat):
        if formats == [known]:
            found: SampleFormat = known
            return found
    raise MessageError("format", formats if len(formats) > 1 else formats[0], "json, jsonl or tree")


@dataclass(frozen=True)
class ExportOptions:
    """Fields of ExportPolicy that differ from the session's defaults, and what is exported besides."""

    policy_fields: Mapping[str, Any] = field(default_factory=dict)
    include_aborted: bool = False
    keep_calls: tuple[str, ...] = ()
    """Names of calls that are exported although they were cancelled."""

    def policy(self, managed: ManagedSession) -> ExportPolicy:
        """The policy for a session. Raises InputError for a value that ExportPolicy refuses."""
        try:
            return replace(managed.default_export_policy, **self.policy_fields)
        except ExportError as error:
            raise InputError(str(error)) from error

    def export(self, managed: ManagedSession) -> SampleStream | Export:
        """The samples, to be built one at a time; an Export if there are none."""
        return managed.export_stream(
            self.policy(managed),
            include_aborted=self.include_aborted,
            keep_calls=attempts_of(managed, self.keep_calls),
        )


@dataclass(frozen=True)
class _FieldKind:
    expected: str
    is_valid: Callable[[Any], bool]
    is_text: bool = False
    is_list: bool = False


_FLAG = _FieldKind("true or false", lambda value: isinstance(value, bool))
_INEXACT = _FieldKind("true, false or context", lambda value: isinstance(value, bool) or value == "context")
_COUNT = _FieldKind("a whole number or null", lambda value: value is None or type(value) is int)
_SEED = _FieldKind("a whole number", lambda value: type(value) is int)
_LOGPROB = _FieldKind("a finite number or null", lambda value: value is None or _is_finite(value))
_CHOICE = _FieldKind("a string", lambda value: isinstance(value, str), is_text=True)
_NAMES = _FieldKind(
    "a list of strings",
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    is_text=True,
    is_list=True,
)
_INCLUDE_ABORTED, _KEEP_CALL = "include_aborted", "keep_call"
_FIELDS: dict[str, _FieldKind] = {
    "shares": _CHOICE,
    "drop": _NAMES,
    "include_inexact": _INEXACT,
    "include_missing_logprobs": _FLAG,
    "missing_logprob": _LOGPROB,
    "max_samples": _COUNT,
    "keep": _CHOICE,
    "max_tokens": _COUNT,
    "seed": _SEED,
    _KEEP_CALL: _NAMES,
    _INCLUDE_ABORTED: _FLAG,
}


def read_export_query(params: Sequence[tuple[str, str]]) -> ExportOptions:
    """Reads the parameters of a query; a list is a repeated parameter, an empty list an empty one."""
    texts: dict[str, list[str]] = {}
    for name, text in params:
        texts.setdefault(name, []).append(text)
    return read_export_policy({name: _query_value(name, values) for name, values in texts.items()})


def read_export_policy(raw: object, path: str = "policy") -> ExportOptions:
    """Reads decoded JSON. Raises MessageError for an unknown field or a value of another type."""
    if not isinstance(raw, Mapping):
        raise MessageError(path, raw, "an object")
    fields: dict[str, Any] = {}
    for name, value in raw.items():
        kind = _FIELDS.get(name)
        if kind is None:
            raise MessageError("parameter", name, f"one of {', '.join(_FIELDS)}")
        if not kind.is_valid(value):
            raise MessageError(name, value, kind.expected)
        fields[name] = frozenset(value) if kind.is_list else value
    include_aborted, keep_calls = fields.pop(_INCLUDE_ABORTED, False), fields.pop(_KEEP_CALL, ())
    return ExportOptions(fields, include_aborted, tuple(keep_calls))


def _query_value(name: str, texts: list[str]) -> Any:
    kind = _FIELDS.get(name)
    if kind is not None and kind.is_list:
        return [text for text in texts if text]
    if len(texts) > 1:
        raise MessageError(name, texts, "one value")
    if kind is None or kind.is_text:
        return texts[0]
    try:
        return msgspec.json.decode(texts[0])
    except msgspec.DecodeError:
        return texts[0]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
