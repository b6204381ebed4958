"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}, "id": "…"}]`, later `[TOOL_CALLS]f[ARGS]{…}`.

No marker closes a call: it is complete with the last bracket of its JSON, and what follows is text again.
"""

from __future__ import annotations

from enum import Enum

from branchline.chat.parsing.base import Delta
from branchline.chat.parsing.draft import Draft
from branchline.chat.parsing.jsontext import JsonScan, elements, is_object, read_call
from branchline.chat.parsing.lexer import Lexer
from branchline.chat.parsing.values import read_name
from branchline.core.message import ToolCall

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class _State(Enum):
    TEXT = 0
    HEAD = 1
    """Behind `[TOOL_CALLS]`: the name of a call, or the bracket of a list."""
    OPENING = 2
    """Behind `[ARGS]`, before the first bracket."""
    JSON = 3


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
        if self._state is not _State.TEXT:
            self._release()
        return self._end()

    def _take(self, text: str, is_marker: bool) -> None:
        if is_marker and text == CALLS and not self._scan.in_string:
            if self._block:
                self._release()
            self._block.append(text)
            self._state = _State.HEAD
            self._head_is_empty = True
        elif self._state is _State.TEXT:
            self._say(text)
        elif self._state is _State.JSON:
            self._take_json(text)
        elif is_marker and self._state is _State.HEAD:
            self._block.append(text)
            self._head_is_empty = False
            self._state = _State.OPENING if text == ARGUMENTS else _State.HEAD
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
                self._state = _State.TEXT
                self._release()

    def _take_json(self, text: str) -> None:
        end = self._scan.feed(text)
        self._block.append(text if end < 0 else text[:end])
        if end < 0 and not self._scan.is_broken:
            return
        self._scan = JsonScan()
        calls = self._read() if end >= 0 else []
        self._state = _State.TEXT
        if calls:
            self._call(*calls)
        else:
            self._release()
        self._say(text[end:] if end >= 0 else "")

    def _read(self) -> list[ToolCall]:
        head = "".join(self._block[1 : self._json_start]).strip()
        body = "".join(self._block[self._json_start :])
        if not head:
            calls = [read_call(item, "arguments", id_key="id") for item in elements(body) or ()]
            return [call for call in calls if call] if all(calls) else []
        name, _, sampled_id = head.removesuffix(ARGUMENTS).partition(CALL_ID)
        name = read_name(name) or ""
        return [ToolCall(name, body, id=sampled_id.strip())] if name and is_object(body) else []
