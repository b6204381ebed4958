"""Harmony (gpt-oss): messages on channels, of which the prompt has opened the first.

`<|channel|>analysis<|message|>` is reasoning, `final` and `commentary` are text, and a message addressed
`to=functions.f` is a call. A trailing `<|call|>` or `<|return|>` is a stop id and does not arrive here.
No whitespace of a message is framing; several messages of one kind are joined as they are.
"""

from __future__ import annotations

import re
from enum import Enum

from branchline.chat.parsing.base import Delta, Problem
from branchline.chat.parsing.draft import Draft
from branchline.chat.parsing.jsontext import JsonScan
from branchline.chat.parsing.lexer import Lexer
from branchline.chat.parsing.values import read_name
from branchline.core.message import ToolCall

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_CLOSERS = (END, CALL, RETURN)
_TO = re.compile(r"(?:^|\s)to=([^\s<]+)")
_HEADER_LIMIT = 200


class _State(Enum):
    HEADER = 0
    REASONING = 1
    TEXT = 2
    CALL = 3


class HarmonyParser(Draft):
    """Reads message after message; what stands between them is text."""

    def __init__(self) -> None:
        super().__init__()
        self._lexer = Lexer(START, CHANNEL, CONSTRAIN, MESSAGE, *_CLOSERS)
        self._state = _State.HEADER
        self._header_length = 0
        self._body_start = 0
        self._name = ""
        self._scan = JsonScan()

    def feed(self, text: str) -> list[Delta]:
        for piece in self._lexer.feed(text):
            self._take(*piece)
        return self._taken()

    def finish(self, cut: bool) -> list[Delta]:
        self._cut = cut
        held = self._lexer.finish()
        if held:
            self._take(held, False)
        if self._state is _State.CALL:
            self._close_call(is_closed=not cut)
        elif self._state is _State.REASONING and cut:
            self.problems.append(Problem.UNCLOSED_REASONING)
        elif self._block:
            self._release_header()
        return self._taken()

    def _take(self, text: str, is_marker: bool) -> None:
        if self._state is _State.HEADER:
            self._take_header(text, is_marker)
        elif self._state is _State.CALL:
            self._take_arguments(text, is_marker)
        elif is_marker and text in (START, *_CLOSERS):
            self._state = _State.TEXT
            if text == START:
                self._open_header(text)
        else:
            self._write(text, reasoning=self._state is _State.REASONING)

    def _open_header(self, start: str) -> None:
        self._block.append(start)
        self._header_length = 0
        self._state = _State.HEADER

    def _take_header(self, text: str, is_marker: bool) -> None:
        self._block.append(text)
        if not is_marker:
            self._header_length += len(text)
            if self._header_length > _HEADER_LIMIT or "\n" in text:
                self._release_header()
        elif text == MESSAGE:
            self._open_message()
        elif text in (START, *_CLOSERS):
            self._block.pop()
            self._release_header()
            self._take(text, True)

    def _open_message(self) -> None:
        header = "".join(self._block)
        role, _, rest = header.removesuffix(MESSAGE).partition(CHANNEL)
        author = role.removeprefix(START).strip()
        addressed = _TO.search(rest) or _TO.search(role.removeprefix(START))
        channel = rest.split(maxsplit=1)[0].partition("<")[0] if rest.strip() else ""
        if author and author.split()[0] != "assistant" and not author.startswith("to="):
            self._release_header()
        elif addressed:
            self._name = addressed[1]
            self._body_start = len(self._block)
            self._scan = JsonScan()
            self._state = _State.CALL
        elif channel in ("analysis", "final", "commentary"):
            self._block.clear()
            self._state = _State.REASONING if channel == "analysis" else _State.TEXT
        else:
            self._release_header()

    def _release_header(self) -> None:
        is_call = self._cut and _TO.search("".join(self._block))
        self.problems.append(Problem.CUT_CALL if is_call else Problem.BROKEN_HEADER)
        self._write("".join(self._block))
        self._block.clear()
        self._state = _State.TEXT

    def _take_arguments(self, text: str, is_marker: bool) -> None:
        if is_marker and text in (START, *_CLOSERS) and not self._scan.in_string:
            self._block.extend([text] if text != START else [])
            self._close_call(is_closed=text == CALL)
            if text == START:
                self._open_header(text)
            return
        self._block.append(text)
        self._scan.feed(text)

    def _close_call(self, *, is_closed: bool) -> None:
        self._state = _State.TEXT
        closer = 1 if self._block[-1] in _CLOSERS else 0
        body = "".join(self._block[self._body_start : len(self._block) - closer]).strip()
        name = read_name(self._name.removeprefix("functions."))
        is_function = self._name.startswith("functions.")
        if is_closed and is_function and name:
            self._call(ToolCall(name, body))
        else:
            self.problems.append(Problem.CUT_CALL if self._cut else Problem.MALFORMED_CALL)
            self._write("".join(self._block))
            self._block.clear()
