"""Arguments as nested tags (MiniMax-M3): a tag per key, `item` per element of a list, bare text as value.

The tags are converted to JSON. The tool's schema types the values of the outermost keys; inside them, a value
that is JSON but no string is copied, and any other value is a string.
"""

from __future__ import annotations

import re

from branchline.chat.parsing.base import Tools
from branchline.chat.parsing.xml_arguments import ANY_TYPE, parameter_types, string_to_json, value_to_json

_ITEM = "item"


def parse_nested_tags(name: str, text: str, marker: str, tools: Tools) -> str:
    """Returns the arguments in a text whose tags follow a marker, or the text itself if the tags are
    malformed."""
    parts = re.split(re.escape(marker) + r"<(/?[^<>/]+)>", text)
    types = parameter_types(name, tools)
    try:
        members, end = _read_members(parts, 1, types)
    except (ValueError, RecursionError):
        return text.strip()
    is_complete = end == len(parts) and not parts[0].strip()
    return _write_object(members) if is_complete else text.strip()


def _read_members(
    parts: list[str], at: int, types: dict[str, frozenset[str]]
) -> tuple[list[tuple[str, str]], int]:
    """Returns the keys and values of the tags from an index on. Tags and the texts after them alternate."""
    members: list[tuple[str, str]] = []
    while at < len(parts) and not parts[at].startswith("/"):
        key = parts[at]
        value, at = _read_value(parts, at, types.get(key, ANY_TYPE))
        if parts[at + 1].strip() or (key != _ITEM and any(key == known for known, _ in members)):
            raise ValueError("text between tags, or a key twice")
        members.append((key, value))
        at += 2
    return members, at


def _read_value(parts: list[str], at: int, types: frozenset[str]) -> tuple[str, int]:
    """Returns the value of the tag at an index, and the index of its closing tag."""
    key, text = parts[at], parts[at + 1]
    members, end = _read_members(parts, at + 2, {})
    if end >= len(parts) or parts[end] != f"/{key}":
        raise ValueError("a tag without an end")
    if not members:
        if not text and types and "string" not in types:
            # The format writes nothing for an empty list or object.
            text = "[]" if "array" in types else "{}" if "object" in types else text
        return value_to_json(text, types), end
    if text.strip():
        raise ValueError("text beside tags")
    if all(known == _ITEM for known, _ in members) and "object" not in types:
        return "[" + ", ".join(value for _, value in members) + "]", end
    return _write_object(members), end


def _write_object(members: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{string_to_json(key)}: {value}" for key, value in members) + "}"
