"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}, "id": "…"}]`, later `[TOOL_CALLS]f[ARGS]{…}`.

No marker closes a call: it ends with the last bracket of its JSON, and text follows. A call whose brackets
do not balance ends at the next `[TOOL_CALLS]`, or at the end of an output that was not cut.
"""

from __future__ import annotations

from enum import Enum

from branchline.chat.parsing.base import FormatParser, MarkerSplitter, Tools
from branchline.chat.parsing.json_scan import JsonScanner, parse_call, parse_lenient, split_array
from branchline.chat.parsing.xml_arguments import parse_tool_name
from branchline.core.message import ToolCall

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class _MistralState(Enum):
    TEXT = 0
    HEAD = 1
    """After `[TOOL_CALLS]`: the name of a call, or the bracket of a list."""
    BEFORE_ARGUMENTS = 2
    """After `[ARGS]`, before the first character of the arguments."""
    JSON = 3
    MALFORMED = 4
    """In arguments or a list that cannot become JSON."""


class MistralParser(FormatParser):
    """Parses both generations of the format, distinguished by what follows `[TOOL_CALLS]`."""

    splitter = MarkerSplitter(CALLS, CALL_ID, ARGUMENTS)

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._state = _MistralState.TEXT
        self._scan = JsonScanner()
        self._json_start = 0
        self._head_is_empty = True

    def _close(self) -> None:
        if not self._truncated:
            self._close_block()
        elif self._block:
            self._flush_block_as_text()

    def _consume(self, text: str, is_marker: bool) -> None:
        if is_marker and text == CALLS and not self._scan.in_string:
            self._close_block()
            self._block.append(text)
            self._state = _MistralState.HEAD
            self._head_is_empty = True
        elif self._state is _MistralState.TEXT:
            self._add_text(text)
        elif self._state is _MistralState.JSON:
            self._consume_json(text)
        elif self._state is _MistralState.MALFORMED:
            self._block.append(text)
        elif is_marker and self._state is _MistralState.HEAD:
            self._block.append(text)
            self._head_is_empty = False
            if text == ARGUMENTS:
                self._state = _MistralState.BEFORE_ARGUMENTS
                self._json_start = len(self._block)
        else:
            self._consume_before_json(text, "[" if self._state is _MistralState.HEAD else "{")

    def _consume_before_json(self, text: str, bracket: str) -> None:
        """Consumes whitespace or a name before the JSON."""
        body = text.lstrip()
        if body.startswith(bracket) and (
            self._state is _MistralState.BEFORE_ARGUMENTS or self._head_is_empty
        ):
            self._block.append(text[: len(text) - len(body)])
            self._json_start = len(self._block)
            self._scan = JsonScanner()
            self._state = _MistralState.JSON
            self._consume_json(body)
            return
        self._block.append(text)
        if body:
            self._head_is_empty = False
            if self._state is _MistralState.BEFORE_ARGUMENTS:
                self._state = _MistralState.MALFORMED

    def _consume_json(self, text: str) -> None:
        end = self._scan.feed(text)
        self._block.append(text if end < 0 else text[:end])
        if self._scan.is_invalid:
            self._state = _MistralState.MALFORMED
        elif end >= 0:
            self._close_block()
            self._add_text(text[end:])

    def _close_block(self) -> None:
        """Ends the block, if there is one: emits it as calls or as text."""
        calls = self._parse_calls() if self._state not in (_MistralState.TEXT, _MistralState.HEAD) else []
        self._state = _MistralState.TEXT
        self._scan = JsonScanner()
        if calls:
            self._add_calls(*calls)
        elif self._block:
            self._flush_block_as_text()

    def _parse_calls(self) -> list[ToolCall]:
        head = "".join(self._block[1 : self._json_start]).strip()
        body = "".join(self._block[self._json_start :]).strip()
        if not head:
            return self._parse_call_list(body)
        name, _, sampled_id = head.removesuffix(ARGUMENTS).partition(CALL_ID)
        name = parse_tool_name(name) or ""
        return [ToolCall(name, body, id=sampled_id.strip())] if name else []

    def _parse_call_list(self, body: str) -> list[ToolCall]:
        items = split_array(body)
        if items is None:
            # Calls that cannot be separated are one call: the first name, with all that follows as arguments.
            call = parse_lenient(body.removeprefix("[").removesuffix("]"))
            return [call] if call is not None else []
        calls = [parse_call(item, "arguments", id_key="id") or parse_lenient(item) for item in items]
        return [call for call in calls if call] if all(calls) else []
