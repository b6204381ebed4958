"""Harmony (gpt-oss): an output is a sequence of messages on channels; the prompt opens the first one.

`<|channel|>analysis<|message|>` is reasoning, `final` and `commentary` are text, and a message with the
recipient `to=functions.f` is a call. A trailing `<|call|>` or `<|return|>` is a stop id and is removed
before. All whitespace of a message is kept; several messages of one kind are concatenated.
"""

from __future__ import annotations

import re
from enum import Enum

from branchline.chat.parsing.base import FormatParser, MarkerSplitter, ParseProblem, Tools
from branchline.chat.parsing.json_scan import JsonScanner
from branchline.chat.parsing.xml_arguments import parse_tool_name
from branchline.core.message import ToolCall

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_CLOSERS = (END, CALL, RETURN)
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_MAX_HEADER_CHARS = 200


class _HarmonyState(Enum):
    HEADER = 0
    REASONING = 1
    TEXT = 2
    CALL = 3


class HarmonyParser(FormatParser):
    """Parses message after message; anything between messages is text."""

    splitter = MarkerSplitter(START, CHANNEL, CONSTRAIN, MESSAGE, *_CLOSERS)

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._state = _HarmonyState.HEADER
        self._header_length = 0
        self._body_start = 0
        self._name = ""
        self._scan = JsonScanner()

    def _close(self) -> None:
        if self._state is _HarmonyState.CALL:
            self._close_call(is_closed=not self._truncated)
        elif self._state is _HarmonyState.REASONING and self._truncated:
            self.problems.append(ParseProblem.UNCLOSED_REASONING)
        elif self._block:
            self._flush_header_as_text()

    def _consume(self, text: str, is_marker: bool) -> None:
        if self._state is _HarmonyState.HEADER:
            self._consume_header(text, is_marker)
        elif self._state is _HarmonyState.CALL:
            self._consume_arguments(text, is_marker)
        elif is_marker and text in (START, *_CLOSERS):
            self._state = _HarmonyState.TEXT
            if text == START:
                self._open_header(text)
        else:
            self._emit(text, reasoning=self._state is _HarmonyState.REASONING)

    def _open_header(self, start: str) -> None:
        self._block.append(start)
        self._header_length = 0
        self._state = _HarmonyState.HEADER

    def _consume_header(self, text: str, is_marker: bool) -> None:
        self._block.append(text)
        if not is_marker:
            self._header_length += len(text)
            if self._header_length > _MAX_HEADER_CHARS or "\n" in text:
                self._flush_header_as_text()
        elif text == MESSAGE:
            self._open_message()
        elif text in (START, *_CLOSERS):
            self._block.pop()
            self._flush_header_as_text()
            self._consume(text, True)

    def _open_message(self) -> None:
        header = "".join(self._block)
        role, _, rest = header.removesuffix(MESSAGE).partition(CHANNEL)
        author = role.removeprefix(START).strip()
        recipient = _RECIPIENT.search(rest) or _RECIPIENT.search(role.removeprefix(START))
        channel = rest.split(maxsplit=1)[0].partition("<")[0] if rest.strip() else ""
        if author and author.split()[0] != "assistant" and not author.startswith("to="):
            self._flush_header_as_text()
        elif recipient:
            self._name = recipient[1]
            self._body_start = len(self._block)
            self._scan = JsonScanner()
            self._state = _HarmonyState.CALL
        elif channel in ("analysis", "final", "commentary"):
            self._block.clear()
            self._state = _HarmonyState.REASONING if channel == "analysis" else _HarmonyState.TEXT
        else:
            self._flush_header_as_text()

    def _flush_header_as_text(self) -> None:
        is_call = self._truncated and _RECIPIENT.search("".join(self._block))
        self.problems.append(ParseProblem.CUT_CALL if is_call else ParseProblem.BROKEN_HEADER)
        self._emit("".join(self._block))
        self._block.clear()
        self._state = _HarmonyState.TEXT

    def _consume_arguments(self, text: str, is_marker: bool) -> None:
        if is_marker and text in (START, *_CLOSERS) and not self._scan.in_string:
            self._block.extend([text] if text != START else [])
            self._close_call(is_closed=text == CALL)
            if text == START:
                self._open_header(text)
            return
        self._block.append(text)
        self._scan.feed(text)

    def _close_call(self, *, is_closed: bool) -> None:
        self._state = _HarmonyState.TEXT
        closer = 1 if self._block[-1] in _CLOSERS else 0
        body = "".join(self._block[self._body_start : len(self._block) - closer]).strip()
        name = parse_tool_name(self._name.removeprefix("functions."))
        is_function = self._name.startswith("functions.")
        if is_closed and is_function and name:
            self._add_calls(ToolCall(name, body))
        else:
            self.problems.append(ParseProblem.CUT_CALL if self._truncated else ParseProblem.MALFORMED_CALL)
            self._emit("".join(self._block))
            self._block.clear()
