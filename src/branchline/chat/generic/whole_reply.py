"""Tells whether a template shows a reply whole: its text, its reasoning, the name and arguments of each call.

Each part is replaced by a mark that no template changes, and both replies are rendered. The template shows
the reply whole if the rendered marks, replaced by the parts, give the rendered reply. So a part that the
template leaves out, cuts, changes or reads is found. White space around a text may be lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from branchline.chat.template_traits import has_malformed_arguments
from branchline.chat.token_escapes import Escape
from branchline.core.message import Message, ToolCall

Render = Callable[[Message], str | None]
_FIRST_MARK = 0x100000
"""The first character of the last private plane: it has no meaning, case or composition, and length 1."""
_FIRST_NUMBER = 7_351_900_000
"""Marks of values that are no strings, because templates show them without quotes."""
_MAX_MARKS = 10_000
_ANY_MARK = re.compile("([\U00100000-\U0010270f]|73519\\d{5})")
_SCALAR = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?|-?\d[\d.eE+-]*|true|false|null', re.DOTALL)
"""A string, which may be a key, or another value without members, in JSON."""


@dataclass(frozen=True)
class WholeReply:
    """A rendered reply that shows every part."""

    parts_end: int
    """The position after its last part."""
    ends_with_content: bool
    """Whether that is the content."""


def find_whole_reply(message: Message, text: str, render: Render, escape: Escape) -> WholeReply | None:
    """Returns what is known of a rendered reply if it shows every part of the message, else None. `render`
    returns the text of a reply without its terminator, in which texts are escaped by `escape`."""
    if message.refusal or message.media or has_malformed_arguments(message):
        return None
    marks = _Marks(escape)
    marked = render(marks.mark(message))
    if marked is None or len(marks.parts) > _MAX_MARKS or _ANY_MARK.search(text):
        return None
    pieces = _ANY_MARK.split(marked)
    found = pieces[1::2]
    if set(found) != marks.parts.keys():
        return None
    ends = {0}
    for place, piece in enumerate(pieces):
        ends = marks.parts[piece].ends(text, ends) if place % 2 else _Part((piece,)).ends(text, ends)
    if len(text) not in ends:
        return None
    ends_with_content = bool(found and message.content.strip()) and found[-1] == chr(_FIRST_MARK)
    return WholeReply(len(text) - len(pieces[-1]), ends_with_content)


@dataclass(frozen=True)
class _Part:
    """The ways in which a template may show one part of a reply."""

    spellings: tuple[str, ...]
    is_text: bool = False
    """White space may stand around it."""

    def ends(self, text: str, starts: set[int]) -> set[int]:
        """Returns where the part ends if it begins at one of these positions."""
        starts = _after_spaces(text, starts) if self.is_text else starts
        found = {
            start + len(spelling)
            for start in starts
            for spelling in self.spellings
            if text.startswith(spelling, start)
        }
        return _after_spaces(text, found) if self.is_text else found


@dataclass
class _Marks:
    """Replaces the parts of a reply by marks."""

    escape: Escape
    parts: dict[str, _Part] = field(default_factory=dict)
    """By the mark."""

    def mark(self, message: Message) -> Message:
        content, reasoning = map(self._mark_text, (message.content, message.reasoning_content))
        calls = tuple(map(self._mark_call, message.tool_calls))
        return msgspec.structs.replace(
            message, content=content, reasoning_content=reasoning, tool_calls=calls, parts=()
        )

    def _mark_text(self, text: str) -> str:
        shown = self.escape(text).strip()
        return self._add(_Part((shown,), is_text=True)) if shown else text

    def _mark_call(self, call: ToolCall) -> ToolCall:
        name = self._add(_Part((self.escape(call.name),))) if call.name else ""
        return msgspec.structs.replace(
            call, name=name, arguments=_SCALAR.sub(self._mark_scalar, call.arguments)
        )

    def _mark_scalar(self, match: re.Match[str]) -> str:
        written, inner, colon = match[0], match[1], match[2]
        if inner is None:
            value = json.loads(written)
            return self._add(_Part((written, json.dumps(value), str(value))), is_number=True)
        if colon is not None:
            # The key stays, because templates may sort by keys; the mark stands for nothing.
            return f'"{inner}{self._add(_Part(("",)))}"{colon}'
        text = self.escape(json.loads(written))
        in_json = [json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
        return f'"{self._add(_Part((self.escape(inner), text, *in_json)))}"'

    def _add(self, part: _Part, *, is_number: bool = False) -> str:
        place = min(len(self.parts), _MAX_MARKS)
        mark = str(_FIRST_NUMBER + place) if is_number else chr(_FIRST_MARK + place)
        self.parts[mark] = part
        return mark


def _after_spaces(text: str, starts: set[int]) -> set[int]:
    """Returns the positions in the white space from each start on."""
    found = set(starts)
    for start in starts:
        end = start
        while end < len(text) and text[end].isspace():
            end += 1
            found.add(end)
    return found
