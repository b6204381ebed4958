"""Llama 3.1 and later: the whole output is `{"name": "f", "parameters": {…}}`, or several with `;` between.

Nothing frames a call but the end of the output, so calls are said there; an output that cannot be calls
any more is text from then on. `<|python_tag|>` may stand in front.
"""

from __future__ import annotations

import re
from enum import Enum

from branchline.chat.parsing.base import MessageDelta, ParseProblem
from branchline.chat.parsing.format_parser import FormatParser
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
    """Whitespace behind a JSON object, up to a `;` or the end."""
    TEXT = 4


class Llama3Parser(FormatParser):
    """Holds JSON back to the end, and lets everything else through."""

    def __init__(self) -> None:
        super().__init__()
        self._state = _Llama3State.START
        self._lead = ""
        self._is_tagged = False
        self._scan = JsonScanner()
        self._objects: list[list[str]] = []

    def feed(self, text: str) -> list[MessageDelta]:
        while text and self._state is not _Llama3State.TEXT:
            text = self._consume(text)
        self._append(text)
        return self._pop_deltas()

    def finish(self, cut: bool) -> list[MessageDelta]:
        self._truncated = cut
        calls = self._parse_calls() if self._state is _Llama3State.AFTER_JSON else []
        if calls:
            self._add_calls(*calls)
        elif self._state is not _Llama3State.TEXT:
            self._block.append(self._lead)
            self._treat_as_text()
        return self._final_deltas()

    def _consume(self, text: str) -> str:
        """Reads on; what is left of the text comes back."""
        if self._state is _Llama3State.START:
            return self._consume_start(text)
        if self._state is _Llama3State.JSON:
            end = self._scan.feed(text)
            taken = text if end < 0 else text[:end]
            self._block.append(taken)
            self._objects[-1].append(taken)
            if self._scan.is_invalid:
                self._treat_as_text()
            elif end >= 0:
                self._state = _Llama3State.AFTER_JSON
            return text[len(taken) :]
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
        self._lead += text
        body = self._lead.lstrip()
        if PYTHON_TAG.startswith(body) and body != PYTHON_TAG:
            return ""
        self._is_tagged = body.startswith(PYTHON_TAG)
        rest = body.removeprefix(PYTHON_TAG)
        self._block.append(self._lead[: len(self._lead) - len(rest)])
        self._lead = ""
        self._state = _Llama3State.BEFORE_JSON
        return rest

    def _parse_calls(self) -> list[ToolCall]:
        calls = [parse_call("".join(parts), "parameters", "arguments") for parts in self._objects]
        # A name alone is no call here: an answer that is JSON may well have one.
        return [call for call in calls if call] if all(call and call.arguments for call in calls) else []

    def _treat_as_text(self) -> None:
        """It is text: a problem only where it set out to be a call, for an answer may well be JSON."""
        self._state = _Llama3State.TEXT
        begun = self._objects and _CALL_PREFIX.match("".join(self._objects[0]))
        if self._is_tagged or begun:
            self.problems.append(ParseProblem.CUT_CALL if self._truncated else ParseProblem.MALFORMED_CALL)
        self._append("".join(self._block))
        self._block.clear()
