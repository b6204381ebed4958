"""Formats whose calls no marker closes, and whose openers are ordinary text.

- A JSON array after an opener (`Action:`, `functools`) ends with its last bracket. The opener counts only if
  a known head and a bracket follow it; until then the text is held back.
- Functionary 3.2 writes `>>>`, a recipient and a line break before each part. A call ends at the next `>>>`
  or at the end of the output.

A call whose brackets do not balance ends at the next opener, or at the end of an output that was not cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from branchline.chat.parsing.base import FormatParser, MarkerSplitter, Tools
from branchline.chat.parsing.framed import BodyParser
from branchline.chat.parsing.json_formats import parse_objects
from branchline.chat.parsing.json_scan import JsonScanner
from branchline.chat.parsing.xml_arguments import parse_tool_name
from branchline.core.message import ToolCall

_BRACKET = re.compile(r"[\[{]")


@dataclass(frozen=True)
class JsonListFormat:
    """Calls in a JSON array after an opener. Calling it creates a parser."""

    opener: str
    heads: tuple[str, ...]
    """What may stand between the opener and the array, apart from whitespace."""
    parse_body: BodyParser
    fence: str = ""
    """Framing that may follow the array."""

    def __call__(self, tools: Tools = ()) -> JsonListParser:
        return JsonListParser(self, tools)

    @cached_property
    def splitter(self) -> MarkerSplitter:
        return MarkerSplitter(self.opener)


JSON_LIST_FORMATS: dict[str, JsonListFormat] = {
    # Command R and R+: Action:\n```json\n[{"tool_name": "f", "parameters": {…}}]```
    "command_r": JsonListFormat(
        "Action:", ("", "```", "```json"), parse_objects("tool_name", "parameters"), fence="```"
    ),
    # Firefunction 2: functools[{"name": "f", "arguments": {…}}]
    "functools": JsonListFormat("functools", ("",), parse_objects("name", "arguments")),
}


class _ListState(Enum):
    TEXT = 0
    HEAD = 1
    """After an opener, before the first bracket."""
    JSON = 2
    MALFORMED = 3
    """In an array that cannot become well-formed."""
    TAIL = 4
    """After an array, where a fence may follow."""


class JsonListParser(FormatParser):
    """Parses calls in a JSON array after an opener."""

    def __init__(self, list_format: JsonListFormat, tools: Tools = ()) -> None:
        super().__init__(tools)
        self.splitter = list_format.splitter
        self._format = list_format
        self._state = _ListState.TEXT
        self._head = ""
        self._json_start = 0
        self._scan = JsonScanner()
        self._tail = ""

    def _close(self) -> None:
        self._end_part(is_closed=not self._truncated)

    def _consume(self, text: str, is_marker: bool) -> None:
        if is_marker and not (self._state is _ListState.JSON and self._scan.in_string):
            self._end_part(is_closed=True)
            self._block.append(text)
            self._head = ""
            self._state = _ListState.HEAD
        elif self._state is _ListState.TEXT:
            self._add_text(text)
        elif self._state is _ListState.HEAD:
            self._consume_head(text)
        elif self._state is _ListState.JSON:
            self._consume_json(text)
        elif self._state is _ListState.MALFORMED:
            self._block.append(text)
        else:
            self._consume_tail(text)

    def _end_part(self, *, is_closed: bool) -> None:
        """Ends what is open at an opener or at the end of the output."""
        if self._state is _ListState.HEAD:
            self._treat_head_as_text()
        elif self._state is _ListState.TAIL:
            self._add_text(self._tail)
        elif self._state is not _ListState.TEXT:
            self._end_call(is_closed=is_closed)

    def _consume_head(self, text: str) -> None:
        self._head += text
        bracket = _BRACKET.search(self._head)
        head = self._head[: bracket.start()] if bracket else self._head
        if bracket and bracket[0] == "[" and head.strip() in self._format.heads:
            self._block.append(head)
            self._json_start = len(self._block)
            self._scan = JsonScanner()
            self._state = _ListState.JSON
            self._consume_json(self._head[bracket.start() :])
        elif bracket or not any(known.startswith(head.strip()) for known in self._format.heads):
            self._treat_head_as_text()

    def _treat_head_as_text(self) -> None:
        self._state = _ListState.TEXT
        block = "".join(self._block) + self._head
        self._block.clear()
        self._add_text(block)

    def _consume_json(self, text: str) -> None:
        end = self._scan.feed(text)
        self._block.append(text if end < 0 else text[:end])
        if self._scan.is_invalid:
            self._state = _ListState.MALFORMED
        elif end >= 0:
            self._end_call(is_closed=True)
            self._tail = ""
            self._state = _ListState.TAIL if self._format.fence else _ListState.TEXT
            self._consume(text[end:], False)

    def _consume_tail(self, text: str) -> None:
        """Removes the fence after an array, with the whitespace before it."""
        self._tail += text
        rest, fence = self._tail.lstrip(), self._format.fence
        if rest.startswith(fence) or not fence.startswith(rest):
            self._state = _ListState.TEXT
            self._add_text(rest.removeprefix(fence) if rest.startswith(fence) else self._tail)

    def _end_call(self, *, is_closed: bool) -> None:
        self._state = _ListState.TEXT
        body = "".join(self._block[self._json_start :]).rstrip().removesuffix(self._format.fence)
        calls = self._format.parse_body(body, self._tools) if is_closed else ()
        if calls:
            self._add_calls(*calls)
        else:
            self._flush_block_as_text()


class _RecipientState(Enum):
    RECIPIENT = 0
    TEXT = 1
    CALL = 2


class FunctionaryV32Parser(FormatParser):
    """Functionary 3.2: the text after the recipient `all`, and the arguments after the name of a tool.

    The prompt ends with the first `>>>`, so an output starts with a recipient. A recipient that no tool is
    named after counts only if an object follows it.
    """

    splitter = MarkerSplitter(">>>")
    _TEXT_RECIPIENT = "all"

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._state = _RecipientState.RECIPIENT
        self._head = ""
        self._name = ""
        self._body: list[str] = []
        self._is_json: bool | None = None
        """Whether the body of the open call is an object; None before its first character."""
        self._scan = JsonScanner()

    def _close(self) -> None:
        self._end_part(is_closed=not self._truncated)

    def _consume(self, text: str, is_marker: bool) -> None:
        if is_marker and not (self._state is _RecipientState.CALL and self._scan.in_string):
            self._end_part(is_closed=True)
            self._block.append(text)
            self._head = ""
            self._state = _RecipientState.RECIPIENT
        elif self._state is _RecipientState.RECIPIENT:
            self._consume_recipient(text)
        elif self._state is _RecipientState.CALL:
            self._consume_arguments(text)
        else:
            self._add_text(text)

    def _consume_recipient(self, text: str) -> None:
        self._head += text
        recipient, line_break, rest = self._head.partition("\n")
        if line_break and recipient == self._TEXT_RECIPIENT:
            self._block.clear()
            self._state = _RecipientState.TEXT
            self._add_text(rest)
        elif parse_tool_name(recipient) != recipient or (rest.strip() and not self._is_call(recipient, rest)):
            self._treat_recipient_as_text()
        elif line_break and self._is_call(recipient, rest):
            self._block.append(recipient + line_break)
            self._name = recipient
            self._body = []
            self._is_json = None
            self._scan = JsonScanner()
            self._state = _RecipientState.CALL
            self._consume_arguments(rest)

    def _is_call(self, recipient: str, rest: str) -> bool:
        return rest.lstrip().startswith("{") or recipient in self._tool_names

    @cached_property
    def _tool_names(self) -> frozenset[str]:
        functions = [tool.get("function", tool) for tool in self._tools if isinstance(tool, Mapping)]
        return frozenset(str(one.get("name")) for one in functions if isinstance(one, Mapping))

    def _treat_recipient_as_text(self) -> None:
        self._state = _RecipientState.TEXT
        block = "".join(self._block) + self._head
        self._block.clear()
        self._add_text(block)

    def _consume_arguments(self, text: str) -> None:
        self._body.append(text)
        if self._is_json is None and text.strip():
            self._is_json = text.lstrip().startswith("{")
        if self._is_json:
            self._scan.feed(text)

    def _end_part(self, *, is_closed: bool) -> None:
        """Ends what is open at `>>>` or at the end of the output."""
        if self._state is _RecipientState.RECIPIENT:
            self._treat_recipient_as_text()
        elif self._state is _RecipientState.CALL:
            self._block += self._body
            arguments = "".join(self._body).strip()
            if arguments and is_closed:
                self._add_calls(ToolCall(self._name, arguments))
            else:
                self._flush_block_as_text()
