"""Llama 3.1 and later: the complete output is `{"name": "f", "parameters": {…}}`, or several joined by `;`.

Only the end of the output ends a call, so calls are emitted there. An output that can no longer be calls is
text from that point on. `<|python_tag|>` may precede the calls.
"""

from __future__ import annotations

import re
from enum import Enum

from branchline.chat.parsing.base import FormatParser, MessageDelta, ParseProblem, Tools
from branchline.chat.parsing.json_scan import JsonScanner, parse_call
from branchline.core.message import ToolCall

PYTHON_TAG = "<|python_tag|>"
_CALL_PREFIX = re.compile(r'\{\s*"name"')


class _Llama3State(Enum):
    START = 0
    BEFORE_JSON = 1
    """Whitespace before a JSON object."""
    JSON = 2
    AFTER_JSON = 3
    """Whitespace after a JSON object, up to a `;` or the end."""
    TEXT = 4


class Llama3Parser(FormatParser):
    """Holds JSON back until the end and emits everything else at once."""

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._state = _Llama3State.START
        self._prefix = ""
        self._is_tagged = False
        self._scan = JsonScanner()
        self._objects: list[list[str]] = []

    def feed(self, text: str) -> list[MessageDelta]:
        while text and self._state is not _Llama3State.TEXT:
            text = self._consume_next(text)
        self._emit(text)
        return self._pop_deltas()

    def _close(self) -> None:
        calls = self._parse_calls() if self._state is _Llama3State.AFTER_JSON else []
        if calls:
            self._add_calls(*calls)
        elif self._state is not _Llama3State.TEXT:
            self._block.append(self._prefix)
            self._treat_as_text()

    def _consume_next(self, text: str) -> str:
        """Consumes the start of the text and returns the rest."""
        if self._state is _Llama3State.START:
            return self._consume_start(text)
        if self._state is _Llama3State.JSON:
            end = self._scan.feed(text)
            consumed = text if end < 0 else text[:end]
            self._block.append(consumed)
            self._objects[-1].append(consumed)
            if self._scan.is_invalid:
                self._treat_as_text()
            elif end >= 0:
                self._state = _Llama3State.AFTER_JSON
            return text[len(consumed) :]
        body = text.lstrip()
        self._block.append(text[: len(text) - len(body)])
        if self._state is _Llama3State.AFTER_JSON and body.startswith(";"):
            self._block.append(";")
            self._state = _Llama3State.BEFORE_JSON
            return body[1:]
        if self._state is _Llama3State.BEFORE_JSON and body.startswith("{"):
            self._objects.append([])
            self._scan = JsonScanner()
            self._state = _Llama3State.JSON
        elif body:
            self._treat_as_text()
        return body

    def _consume_start(self, text: str) -> str:
        self._prefix += text
        body = self._prefix.lstrip()
        if PYTHON_TAG.startswith(body) and body != PYTHON_TAG:
            return ""
        self._is_tagged = body.startswith(PYTHON_TAG)
        rest = body.removeprefix(PYTHON_TAG)
        self._block.append(self._prefix[: len(self._prefix) - len(rest)])
        self._prefix = ""
        self._state = _Llama3State.BEFORE_JSON
        return rest

    def _parse_calls(self) -> list[ToolCall]:
        calls = [parse_call("".join(parts), "parameters", "arguments") for parts in self._objects]
        # A name alone is not a call: an answer in JSON may contain one.
        return [call for call in calls if call] if all(call and call.arguments for call in calls) else []

    def _treat_as_text(self) -> None:
        """Emits the block as text; a problem only if it started like a call, since an answer may be JSON."""
        self._state = _Llama3State.TEXT
        starts_call = self._objects and _CALL_PREFIX.match("".join(self._objects[0]))
        if self._is_tagged or starts_call:
            self.problems.append(ParseProblem.CUT_CALL if self._truncated else ParseProblem.MALFORMED_CALL)
        self._emit("".join(self._block))
        self._block.clear()
