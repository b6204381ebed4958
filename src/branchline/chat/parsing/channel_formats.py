"""Formats whose outputs are sequences of messages with headers; the prompt opens the first header.

Harmony (gpt-oss): `<|channel|>analysis<|message|>` is reasoning, `final` and `commentary` are text, and a
message with the recipient `to=functions.f` is a call. Muse Glimmer has recipients only: ` to=self<|message|>`
is reasoning, ` to=user` is text, and a message to any other recipient holds calls as tags.

A stop id at the end of an output is removed before. All whitespace of a message is kept; several messages of
one kind are concatenated. A message whose header is not known is text, and so is anything between messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from branchline.chat.parsing.base import FormatParser, MarkerSplitter, ParseProblem, Tools
from branchline.chat.parsing.json_scan import JsonScanner
from branchline.chat.parsing.xml_arguments import build_call, parse_tool_name
from branchline.core.message import ToolCall

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
END_OF_MESSAGE, END_OF_TURN = "<|eom|>", "<|eot|>"
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_MAX_HEADER_CHARS = 200


class _ChannelState(Enum):
    HEADER = 0
    REASONING = 1
    TEXT = 2
    CALL = 3


class _ChannelParser(FormatParser):
    """Parses message after message. A subclass says what a header means and how a call is written."""

    closers: tuple[str, ...]
    """The markers that end a message."""
    call_closers: tuple[str, ...]
    """The markers that complete a call; after any other one it is malformed."""
    calls_are_json: bool
    """A marker inside a string of a call closes nothing."""

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._state = _ChannelState.HEADER
        self._header_length = 0
        self._body_start = 0
        self._recipient = ""
        self._scan = JsonScanner()

    def _message_kind(self, channel: str, recipient: str) -> _ChannelState | None:
        """Returns what a message with this header contains; None if it is not known."""
        raise NotImplementedError

    def _parse_calls(self, recipient: str, body: str) -> Sequence[ToolCall]:
        """Returns the calls of a message; none if they are not readable."""
        raise NotImplementedError

    def _close(self) -> None:
        if self._state is _ChannelState.CALL:
            self._close_call(is_closed=not self._truncated)
        elif self._state is _ChannelState.REASONING and self._truncated:
            self.problems.append(ParseProblem.UNCLOSED_REASONING)
        elif self._block:
            self._flush_header_as_text()

    def _consume(self, text: str, is_marker: bool) -> None:
        if self._state is _ChannelState.HEADER:
            self._consume_header(text, is_marker)
        elif self._state is _ChannelState.CALL:
            self._consume_call(text, is_marker)
        elif is_marker and text in (START, *self.closers):
            self._state = _ChannelState.TEXT
            if text == START:
                self._open_header(text)
        else:
            self._emit(text, reasoning=self._state is _ChannelState.REASONING)

    def _open_header(self, start: str) -> None:
        self._block.append(start)
        self._header_length = 0
        self._state = _ChannelState.HEADER

    def _consume_header(self, text: str, is_marker: bool) -> None:
        self._block.append(text)
        if not is_marker:
            self._header_length += len(text)
            if self._header_length > _MAX_HEADER_CHARS or "\n" in text:
                self._flush_header_as_text()
        elif text == MESSAGE:
            self._open_message()
        elif text in (START, *self.closers):
            self._block.pop()
            self._flush_header_as_text()
            self._consume(text, True)

    def _open_message(self) -> None:
        header = "".join(self._block)
        role, _, rest = header.removesuffix(MESSAGE).partition(CHANNEL)
        author = role.removeprefix(START).strip()
        recipient = _RECIPIENT.search(rest) or _RECIPIENT.search(role.removeprefix(START))
        channel = rest.split(maxsplit=1)[0].partition("<")[0] if rest.strip() else ""
        kind = None
        if not author or author.split()[0] == "assistant" or author.startswith("to="):
            kind = self._message_kind(channel, recipient[1] if recipient else "")
        if kind is None:
            self._flush_header_as_text()
        elif kind is _ChannelState.CALL:
            self._recipient = recipient[1] if recipient else ""
            self._body_start = len(self._block)
            self._scan = JsonScanner()
            self._state = kind
        else:
            self._block.clear()
            self._state = kind

    def _flush_header_as_text(self) -> None:
        is_call = self._truncated and _RECIPIENT.search("".join(self._block))
        self.problems.append(ParseProblem.CUT_CALL if is_call else ParseProblem.BROKEN_HEADER)
        self._emit("".join(self._block))
        self._block.clear()
        self._state = _ChannelState.TEXT

    def _consume_call(self, text: str, is_marker: bool) -> None:
        if is_marker and text in (START, *self.closers) and not self._scan.in_string:
            self._block.extend([text] if text != START else [])
            self._close_call(is_closed=text in self.call_closers)
            if text == START:
                self._open_header(text)
            return
        self._block.append(text)
        if self.calls_are_json:
            self._scan.feed(text)

    def _close_call(self, *, is_closed: bool) -> None:
        self._state = _ChannelState.TEXT
        closer = 1 if self._block[-1] in self.closers else 0
        body = "".join(self._block[self._body_start : len(self._block) - closer]).strip()
        calls = self._parse_calls(self._recipient, body) if is_closed else ()
        if calls:
            self._add_calls(*calls)
        else:
            self.problems.append(ParseProblem.CUT_CALL if self._truncated else ParseProblem.MALFORMED_CALL)
            self._emit("".join(self._block))
            self._block.clear()


class HarmonyParser(_ChannelParser):
    """gpt-oss."""

    closers = (END, CALL, RETURN)
    call_closers = (CALL,)
    calls_are_json = True
    splitter = MarkerSplitter(START, CHANNEL, CONSTRAIN, MESSAGE, *closers)

    def _message_kind(self, channel: str, recipient: str) -> _ChannelState | None:
        if recipient:
            return _ChannelState.CALL
        kinds = {
            "analysis": _ChannelState.REASONING,
            "final": _ChannelState.TEXT,
            "commentary": _ChannelState.TEXT,
        }
        return kinds.get(channel)

    def _parse_calls(self, recipient: str, body: str) -> Sequence[ToolCall]:
        name = parse_tool_name(recipient.removeprefix("functions."))
        return [ToolCall(name, body)] if name and recipient.startswith("functions.") else ()


_INVOKE = re.compile(
    r'<atem:invoke name="(?P<name>[^"<>]*)">(?P<body>(?:(?!<atem:invoke ).)*?)</atem:invoke>', re.DOTALL
)
_PARAMETER = re.compile(
    r'\s*<atem:parameter name="(?P<key>[^"<>]+)">(?P<value>.*?)</atem:parameter>', re.DOTALL
)
_CALLS_OPENER, _CALLS_CLOSER = "<atem:function_calls>", "</atem:function_calls>"


class MuseGlimmerParser(_ChannelParser):
    """Muse Glimmer. A message to a tool holds calls, each with a name and bare values."""

    closers = (END_OF_MESSAGE, END_OF_TURN)
    call_closers = closers
    calls_are_json = False
    splitter = MarkerSplitter(START, MESSAGE, *closers)

    def _message_kind(self, channel: str, recipient: str) -> _ChannelState | None:
        if recipient == "self":
            return _ChannelState.REASONING
        return _ChannelState.TEXT if recipient in ("", "user") else _ChannelState.CALL

    def _parse_calls(self, recipient: str, body: str) -> Sequence[ToolCall]:
        inner = body.removeprefix(_CALLS_OPENER).removesuffix(_CALLS_CLOSER)
        calls: list[ToolCall] = []
        at = 0
        for invoke in _INVOKE.finditer(inner):
            name = parse_tool_name(invoke["name"])
            if name is None or inner[at : invoke.start()].strip():
                return ()
            calls.append(build_call(name, invoke["body"], _PARAMETER, self._tools))
            at = invoke.end()
        return () if inner[at:].strip() else calls
