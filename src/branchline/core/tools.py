"""The tool list of a request, read once and identified by a digest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import xxhash

from branchline.core.arguments import canonical_json
from branchline.core.errors import InputError, MessageError
from branchline.core.json_fields import replace_surrogates_deep


class CachedJsonDict(dict[str, Any]):
    """An object that is no longer modified; its JSON text is made once."""

    @cached_property
    def json_text(self) -> str:
        return json.dumps(self, ensure_ascii=False)


class ToolList(tuple[dict[str, Any], ...]):
    """The tools of a request. Derived values are cached, because every request repeats its tools."""

    @cached_property
    def digest(self) -> bytes:
        return json_digest([dict(tool) for tool in self])

    @cached_property
    def cached_json_dicts(self) -> list[CachedJsonDict]:
        """The tools for a chat template, which may render their JSON."""
        return [CachedJsonDict(tool) for tool in self]


def read_tools(raw: object, field_path: str = "tools") -> ToolList:
    """Reads the tool list of a request; null, absent and empty are equal."""
    if raw is None:
        return ToolList()
    if not isinstance(raw, list | tuple):
        raise MessageError(field_path, raw, "a list of tools (objects) or null")
    for index, tool in enumerate(raw):
        if not isinstance(tool, dict):
            raise MessageError(f"{field_path}[{index}]", tool, "a tool (an object)")
    tools: Sequence[dict[str, Any]] = raw
    try:
        msgspec.json.encode(tools)
    except (UnicodeEncodeError, TypeError, OverflowError, RecursionError):
        # Rare: texts that UTF-8 cannot encode. Values that are not JSON are rejected by `json_digest`.
        tools = replace_surrogates_deep(tools)
    return ToolList(tools)


def json_digest(*values: object) -> bytes:
    """Returns 16 bytes that identify JSON values regardless of key order; b"" if all values are empty."""
    if not any(values):
        return b""
    try:
        return xxhash.xxh3_128_digest(b"\0".join([canonical_json(value) for value in values]))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"tools and template arguments: expected JSON values, but {error}") from error
