"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}, "id": "…"}]`, later `[TOOL_CALLS]f[ARGS]{…}`.

No marker closes a call: it is complete with the last bracket of its JSON, and what follows is text again.
What never gets to its last bracket ends at the next `[TOOL_CALLS]`, or with the output unless that was cut.
"""

from __future__ import annotations

from enum import Enum

from branchline.chat.parsing.base import Delta
from branchline.chat.parsing.draft import Draft
from branchline.chat.parsing.jsontext import JsonScan, elements, read_call, read_loosely
from branchline.chat.parsing.lexer import Lexer
from branchline.chat.parsing.values import read_name
from branchline.core.message import ToolCall

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class _State(Enum):
    TEXT = 0
    HEAD = 1
    """Behind `[TOOL_CALLS]`: the name of a call, or the bracket of a list."""
    OPENING = 2
    """Behind `[ARGS]`, before the first letter of the arguments."""
    JSON = 3
    LOOSE = 4
    """In arguments or a list that can never be JSON."""


class MistralParser(Draft):
    """Both generations of the format, told apart by what follows `[TOOL_CALLS]`."""

    def __init__(self) -> None:
        super().__init__()
        self._lexer = Lexer(CALLS, CALL_ID, ARGUMENTS)
        self._state = _State.TEXT
        self._scan = JsonScan()
        self._json_start = 0
        self._head_is_empty = True

    def feed(self, text: str) -> list[Delta]:
        for piece in self._lexer.feed(text):
            self._take(*piece)
        return self._taken()

    def finish(self, cut: bool) -> list[Delta]:
        self._cut = cut
        held = self._lexer.finish()
        if held:
            self._take(held, False)
        if not cut:
            self._close()
        elif self._block:
            self._release()
        return self._end()

    def _take(self, text: str, is_marker: bool) -> None:
        if is_marker and text == CALLS and not self._scan.in_string:
            self._close()
            self._block.append(text)
            self._state = _State.HEAD
            self._head_is_empty = True
        elif self._state is _State.TEXT:
            self._say(text)
        elif self._state is _State.JSON:
            self._take_json(text)
        elif self._state is _State.LOOSE:
            self._block.append(text)
        elif is_marker and self._state is _State.HEAD:
            self._block.append(text)
            self._head_is_empty = False
            if text == ARGUMENTS:
                self._state = _State.OPENING
                self._json_start = len(self._block)
        else:
            self._take_lead(text, "[" if self._state is _State.HEAD else "{")

    def _take_lead(self, text: str, bracket: str) -> None:
        """What stands before the JSON: whitespace, or a name."""
        body = text.lstrip()
        if body.startswith(bracket) and (self._state is _State.OPENING or self._head_is_empty):
            self._block.append(text[: len(text) - len(body)])
            self._json_start = len(self._block)
            self._scan = JsonScan()
            self._state = _State.JSON
            self._take_json(body)
            return
        self._block.append(text)
        if body:
            self._head_is_empty = False
            if self._state is _State.OPENING:
                self._state = _State.LOOSE

    def _take_json(self, text: str) -> None:
        end = self._scan.feed(text)
        self._block.append(text if end < 0 else text[:end])
        if self._scan.is_broken:
            self._state = _State.LOOSE
        elif end >= 0:
            self._close()
            self._say(text[end:])

    def _close(self) -> None:
        """The block, if there is one, ends here: it is calls, or text after all."""
        calls = self._read() if self._state not in (_State.TEXT, _State.HEAD) else []
        self._state = _State.TEXT
        self._scan = JsonScan()
        if calls:
            self._call(*calls)
        elif self._block:
            self._release()

    def _read(self) -> list[ToolCall]:
        head = "".join(self._block[1 : self._json_start]).strip()
        body = "".join(self._block[self._json_start :]).strip()
        if not head:
            return self._read_list(body)
        name, _, sampled_id = head.removesuffix(ARGUMENTS).partition(CALL_ID)
        name = read_name(name) or ""
        return [ToolCall(name, body, id=sampled_id.strip())] if name else []

    def _read_list(self, body: str) -> list[ToolCall]:
        items = elements(body)
        if items is None:
            # Who cannot be told apart is one call: the first, with all that follows its name.
            call = read_loosely(body.removeprefix("[").removesuffix("]"))
            return [call] if call is not None else []
        calls = [read_call(item, "arguments", id_key="id") or read_loosely(item) for item in items]
        return [call for call in calls if call] if all(calls) else []
