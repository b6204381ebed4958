"""Llama 3.1 and later: the whole output is `{"name": "f", "parameters": {…}}`, or several with `;` between.

Nothing frames a call but the end of the output, so calls are said there; an output that cannot be calls
any more is text from then on. `<|python_tag|>` may stand in front.
"""

from __future__ import annotations

import re
from enum import Enum

from branchline.chat.parsing.base import Delta, Problem
from branchline.chat.parsing.draft import Draft
from branchline.chat.parsing.jsontext import JsonScan, read_call
from branchline.core.message import ToolCall

TAG = "<|python_tag|>"
_CALL_BEGINS = re.compile(r'\{\s*"name"')


class _State(Enum):
    START = 0
    BEFORE = 1
    """Whitespace before a JSON object."""
    JSON = 2
    BEHIND = 3
    """Whitespace behind a JSON object, up to a `;` or the end."""
    TEXT = 4


class Llama3Parser(Draft):
    """Holds JSON back to the end, and lets everything else through."""

    def __init__(self) -> None:
        super().__init__()
        self._state = _State.START
        self._lead = ""
        self._is_tagged = False
        self._scan = JsonScan()
        self._objects: list[list[str]] = []

    def feed(self, text: str) -> list[Delta]:
        while text and self._state is not _State.TEXT:
            text = self._take(text)
        self._write(text)
        return self._taken()

    def finish(self, cut: bool) -> list[Delta]:
        self._cut = cut
        calls = self._read() if self._state is _State.BEHIND else []
        if calls:
            self._call(*calls)
        elif self._state is not _State.TEXT:
            self._block.append(self._lead)
            self._give_up()
        return self._end()

    def _take(self, text: str) -> str:
        """Reads on; what is left of the text comes back."""
        if self._state is _State.START:
            return self._take_start(text)
        if self._state is _State.JSON:
            end = self._scan.feed(text)
            taken = text if end < 0 else text[:end]
            self._block.append(taken)
            self._objects[-1].append(taken)
            if self._scan.is_broken:
                self._give_up()
            elif end >= 0:
                self._state = _State.BEHIND
            return text[len(taken) :]
        body = text.lstrip()
        self._block.append(text[: len(text) - len(body)])
        if self._state is _State.BEHIND and body.startswith(";"):
            self._block.append(";")
            self._state = _State.BEFORE
            return body[1:]
        if self._state is _State.BEFORE and body.startswith("{"):
            self._objects.append([])
            self._scan = JsonScan()
            self._state = _State.JSON
        elif body:
            self._give_up()
        return body

    def _take_start(self, text: str) -> str:
        self._lead += text
        body = self._lead.lstrip()
        if TAG.startswith(body) and body != TAG:
            return ""
        self._is_tagged = body.startswith(TAG)
        rest = body.removeprefix(TAG)
        self._block.append(self._lead[: len(self._lead) - len(rest)])
        self._lead = ""
        self._state = _State.BEFORE
        return rest

    def _read(self) -> list[ToolCall]:
        calls = [read_call("".join(parts), "parameters", "arguments") for parts in self._objects]
        # A name alone is no call here: an answer that is JSON may well have one.
        return [call for call in calls if call] if all(call and call.arguments for call in calls) else []

    def _give_up(self) -> None:
        """It is text: a problem only where it set out to be a call, for an answer may well be JSON."""
        self._state = _State.TEXT
        begun = self._objects and _CALL_BEGINS.match("".join(self._objects[0]))
        if self._is_tagged or begun:
            self.problems.append(Problem.CUT_CALL if self._cut else Problem.MALFORMED_CALL)
        self._write("".join(self._block))
        self._block.clear()
