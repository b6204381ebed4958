"""Scans generated JSON: where a value ends, and the exact text of an object's members.

Well-formed means accepted by Python's `json`, because clients parse arguments with it. Arguments keep the
text in which they were generated, and malformed arguments never become a JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from branchline.core.message import ToolCall

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\\x00-\x1f]')
_CLOSERS = {"{": "}", "[": "]"}
_SPACE = re.compile(r"[ \t\n\r]*")
_CALL_PREFIX = r'\s*\{\s*%s"%s"\s*:\s*"(?P<name>[^\s<>{}"\\,]+)"\s*,?\s*(?:"%s"\s*:)?'
"""The part of a call that must be complete for its name to be readable."""
_ID_MEMBER = r'(?:"%s"\s*:\s*"(?P<id>[^"\\]*)"\s*,\s*)?'


class JsonScanner:
    """Follows a JSON object or array through chunks of text; each character is scanned once.

    >>> scan = JsonScanner()
    >>> scan.feed('{"a": "}'), scan.feed('"} tail')
    (-1, 2)
    """

    def __init__(self, *, repeats: bool = False) -> None:
        self._repeats = repeats
        """Further values may follow the first one."""
        self.in_string = False
        self.is_invalid = False
        """The text cannot become JSON: a control character in a string, or a closer without its opener."""
        self.is_complete = False
        """The outermost bracket is closed, and with `repeats` no further one is open."""
        self._closers: list[str] = []
        self._escaped = False

    def feed(self, text: str) -> int:
        """Returns the offset in this text after the value's last character, or -1 if the value continues."""
        at = 0
        if self._escaped and text:
            self._escaped = False
            at = 1
        while not self.is_invalid and (self._repeats or not self.is_complete):
            match = (_INSIDE if self.in_string else _OUTSIDE).search(text, at)
            if match is None:
                return -1
            at = match.end()
            char = match[0]
            if char == '"':
                self.in_string = not self.in_string
            elif char == "\\":
                self._escaped = at == len(text)
                at += 1
            elif char in _CLOSERS:
                self._closers.append(_CLOSERS[char])
                self.is_complete = False
            elif self._closers and char == self._closers[-1]:
                self._closers.pop()
                self.is_complete = not self._closers
                if self.is_complete and not self._repeats:
                    return at
            else:
                self.is_invalid = True
                self.in_string = False
        return -1


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decode_value = json.JSONDecoder(parse_constant=_reject_constant).raw_decode


def load_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises only ValueError."""
    try:
        start = _skip_whitespace(text, 0)
        value, end = _decode_value(text, start)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if _skip_whitespace(text, end) != len(text):
        raise ValueError("more than one value")
    return value


def is_json_object(text: str) -> bool:
    """Whether the text is one JSON object."""
    try:
        return isinstance(load_json(text), dict)
    except ValueError:
        return False


def split_array(text: str) -> list[str] | None:
    """Returns the source text of each element of a JSON array, or None if the text is not an array."""
    return _split(text, "[", "]", _parse_element)


def split_sequence(text: str) -> list[str] | None:
    """Returns the source text of JSON values that follow each other, or None if there is other text.

    >>> split_sequence('{"a": 1}\\n{"b": 2}')
    ['{"a": 1}', '{"b": 2}']
    """
    items: list[str] = []
    at = _skip_whitespace(text, 0)
    try:
        while at < len(text):
            item, at = _parse_element(text, at)
            items.append(item)
            at = _skip_whitespace(text, at)
    except (ValueError, RecursionError):
        return None
    return items


def split_object(text: str) -> dict[str, str] | None:
    """Returns the source text of each value of a JSON object, or None if the text is not an object.

    >>> split_object('{"name": "f", "arguments": {"x":1.0}}')
    {'name': '"f"', 'arguments': '{"x":1.0}'}
    """
    parts = _split(text, "{", "}", _parse_member)
    return None if parts is None else dict(parts)


Part = TypeVar("Part")


def _split(
    text: str, opener: str, closer: str, part_at: Callable[[str, int], tuple[Part, int]]
) -> list[Part] | None:
    """Returns the comma-separated parts between two brackets, or None if the text has another form."""
    at = _skip_whitespace(text, 0)
    if text[at : at + 1] != opener:
        return None
    parts: list[Part] = []
    at = _skip_whitespace(text, at + 1)
    try:
        while parts or text[at : at + 1] != closer:
            part, at = part_at(text, at)
            parts.append(part)
            at = _skip_whitespace(text, at)
            if text[at : at + 1] != ",":
                break
            at = _skip_whitespace(text, at + 1)
    except (ValueError, RecursionError):
        return None
    ended = text[at : at + 1] == closer and _skip_whitespace(text, at + 1) == len(text)
    return parts if ended else None


def _parse_element(text: str, at: int) -> tuple[str, int]:
    _, end = _decode_value(text, at)
    return text[at:end], end


def _parse_member(text: str, at: int) -> tuple[tuple[str, str], int]:
    if text[at : at + 1] != '"':
        raise ValueError("not a key")
    key, at = _decode_value(text, at)
    at = _skip_whitespace(text, at)
    if text[at : at + 1] != ":":
        raise ValueError("a key without a value")
    value, end = _parse_element(text, _skip_whitespace(text, at + 1))
    return (key, value), end


def parse_call(text: str, *argument_keys: str, name_key: str = "name", id_key: str = "") -> ToolCall | None:
    """Returns the call that a JSON object describes, with its arguments as generated, or None.

    The arguments of a call that has only a name are an empty text.
    """
    found = split_object(text)
    name = _parse_string(found.get(name_key, "")) if found is not None else ""
    if not name or found is None:
        return None
    arguments = next((found[key] for key in argument_keys if key in found), None)
    if arguments is None:
        if found.keys() - {name_key, id_key}:
            return None
        arguments = ""
    return ToolCall(name, arguments, id=_parse_string(found.get(id_key, "")))


def parse_lenient(
    text: str, name_key: str = "name", argument_key: str = "arguments", id_key: str = ""
) -> ToolCall | None:
    """Returns a call that is not JSON but starts with its name; the rest are its arguments, as generated.

    >>> parse_lenient('{"name": "f", "arguments": {"x": 1,}}').arguments
    '{"x": 1,}'

    The last brace belongs to the call. A missing brace is missing in the arguments and a superfluous one is
    kept there, so the arguments are never an object, and never empty, which would mean an empty object.
    """
    id_member = _ID_MEMBER % id_key if id_key else ""
    opening = re.match(_CALL_PREFIX % (id_member, name_key, argument_key), text)
    if opening is None:
        return None
    rest = text[opening.end() :].strip()
    arguments = rest.removesuffix("}").rstrip()
    if not arguments or is_json_object(arguments):
        arguments = rest
    return ToolCall(opening["name"], arguments, id=opening.groupdict().get("id") or "") if arguments else None


def _parse_string(text: str) -> str:
    """Returns the string that a JSON text encodes, or an empty string if it encodes none."""
    try:
        value = load_json(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _skip_whitespace(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
