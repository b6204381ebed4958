"""JSON as it was sampled: where a value ends, and the exact text of an object's members.

Well-formed is what Python's `json` reads, because that is what the clients of a call read it with. Calls are
read to their name; their arguments stand as they were written, and nothing malformed comes out an object.
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
_CALL_PREFIX = re.compile(r'\s*\{\s*"name"\s*:\s*"([^\s<>{}"\\,]+)"\s*,?\s*(?:"arguments"\s*:)?')
"""As much of a call as has to be whole for its name to be read."""


class JsonScanner:
    """Follows a JSON object or array through pieces of text, each character once.

    >>> scan = JsonScanner()
    >>> scan.feed('{"a": "}'), scan.feed('"} tail')
    (-1, 2)
    """

    def __init__(self) -> None:
        self.in_string = False
        self.is_invalid = False
        """It can never be JSON: a raw line break in a string, or a closer of something else than is open."""
        self.is_complete = False
        """Its last bracket is closed."""
        self._closers: list[str] = []
        self._escaped = False

    def feed(self, text: str) -> int:
        """The place in this text behind the value's last character; -1 while it goes on."""
        at = 0
        if self._escaped and text:
            self._escaped = False
            at = 1
        while not (self.is_complete or self.is_invalid):
            match = (_INSIDE if self.in_string else _OUTSIDE).search(text, at)
            if match is None:
                return -1
            at = match.end()
            letter = match[0]
            if letter == '"':
                self.in_string = not self.in_string
            elif letter == "\\":
                self._escaped = at == len(text)
                at += 1
            elif letter in _CLOSERS:
                self._closers.append(_CLOSERS[letter])
            elif self._closers and letter == self._closers[-1]:
                self._closers.pop()
                self.is_complete = not self._closers
                if self.is_complete:
                    return at
            else:
                self.is_invalid = True
                self.in_string = False
        return -1


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decode_value = json.JSONDecoder(parse_constant=_reject_constant).raw_decode


def load_json(text: str) -> Any:
    """The value of a JSON text; ValueError where it is none, however it fails."""
    try:
        start = _skip_whitespace(text, 0)
        value, end = _decode_value(text, start)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if _skip_whitespace(text, end) != len(text):
        raise ValueError("more than one value")
    return value


def is_json_object(text: str) -> bool:
    """Whether a text is one JSON object."""
    try:
        return isinstance(load_json(text), dict)
    except ValueError:
        return False


def split_array(text: str) -> list[str] | None:
    """The elements of a JSON array, each as the text it was written in; None where it is no array."""
    return _split(text, "[", "]", _parse_element)


def split_object(text: str) -> dict[str, str] | None:
    """The members of a JSON object, each value as the text it was written in; None where it is no object.

    >>> split_object('{"name": "f", "arguments": {"x":1.0}}')
    {'name': '"f"', 'arguments': '{"x":1.0}'}
    """
    parts = _split(text, "{", "}", _parse_member)
    return None if parts is None else dict(parts)


Part = TypeVar("Part")


def _split(
    text: str, opener: str, closer: str, part_at: Callable[[str, int], tuple[Part, int]]
) -> list[Part] | None:
    """What stands between two brackets and commas, read one after the other."""
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


def parse_call(text: str, *argument_keys: str, id_key: str = "") -> ToolCall | None:
    """The call that one JSON object spells, its arguments as they were written, whatever they are.

    A call that says nothing but its name has none, which is an empty text.
    """
    found = split_object(text)
    name = _parse_string(found.get("name", "")) if found is not None else ""
    if not name or found is None:
        return None
    arguments = next((found[key] for key in argument_keys if key in found), None)
    if arguments is None:
        if found.keys() - {"name", id_key}:
            return None
        arguments = ""
    return ToolCall(name, arguments, id=_parse_string(found.get(id_key, "")))


def parse_lenient(text: str) -> ToolCall | None:
    """A call that is no JSON, but says its name first: what follows is its arguments, as they were written.

    >>> parse_lenient('{"name": "f", "arguments": {"x": 1,}}').arguments
    '{"x": 1,}'

    The last brace is the call's. Where a brace is missing the arguments lack one, and where there is one too
    many they have it: what comes out is never an object, nor nothing, which would mean one.
    """
    opening = _CALL_PREFIX.match(text)
    if opening is None:
        return None
    rest = text[opening.end() :].strip()
    arguments = rest.removesuffix("}").rstrip()
    if not arguments or is_json_object(arguments):
        arguments = rest
    return ToolCall(opening[1], arguments) if arguments else None


def _parse_string(text: str) -> str:
    """The string that a JSON text is; empty where it is none."""
    try:
        value = load_json(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _skip_whitespace(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
