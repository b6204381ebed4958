"""What the parsers of all output formats share: deltas, problems, and finding markers in streamed text.

The deltas add up to the same message however the text is split into chunks: text that could still become a
marker is held back, and nothing emitted is ever withdrawn. A tool call is emitted when it is closed and its
name is readable. Its arguments stay as they were generated, so that the client sees the model's mistakes. A
call that is cut or has no name stays text, character for character.

Newlines around a call belong to its framing: those directly before its opener, and those after its closer
up to the next call or the end. All other newlines are text, and so is a block that is not a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from branchline.chat.parsing.json_scan import is_json_object
from branchline.core.message import ToolCall

Tools = Sequence[Mapping[str, Any]]
REPLACEMENT_CHARACTER = "\ufffd".encode()


class ParseProblem(StrEnum):
    """A defect of an output. The problems found do not depend on how the output was split."""

    MALFORMED_CALL = "malformed_call"
    """Delimited like a tool call, but not readable as one; it stays in the text."""
    MALFORMED_ARGUMENTS = "malformed_arguments"
    """A tool call whose arguments are not a JSON object; they are kept as generated."""
    CUT_CALL = "cut_call"
    """The output ended inside a tool call; the call stays in the text."""
    BROKEN_HEADER = "broken_header"
    """An unknown header of a message; it stays in the text."""
    UNCLOSED_REASONING = "unclosed_reasoning"
    INVALID_UTF8 = "invalid_utf8"
    """Invalid bytes, decoded as U+FFFD exactly as when the whole output is decoded at once."""
    UNKNOWN_ID = "unknown_id"
    """An id outside the vocabulary (engines pad theirs), decoded as U+FFFD."""


class MessageDelta(Struct, frozen=True):
    """The next part of a message: reasoning, text, or one complete tool call."""

    content: str = ""
    reasoning_content: str = ""
    tool_call: ToolCall | None = None
    index: int = 0
    """The index of the tool call in the message."""


class TextParser(Protocol):
    """Parses the text of one output in one format. A parser is used once."""

    @property
    def problems(self) -> list[ParseProblem]: ...

    def feed(self, text: str) -> list[MessageDelta]:
        """Returns what is certain after this text."""
        ...

    def finish(self, cut: bool) -> list[MessageDelta]:
        """Returns what was held back. `cut`: the output ended before the model stopped."""
        ...


class Lexeme(NamedTuple):
    """A run of text, or one marker."""

    text: str
    is_marker: bool


class MarkerSplitter:
    """Splits text at the markers of a format.

    No marker occurs inside another one, so whether a marker starts at a character depends only on the
    characters from there on. The lexemes are therefore the same for every chunking.
    """

    def __init__(self, *markers: str) -> None:
        self.markers = tuple(dict.fromkeys(markers))
        if any(one in other for one in self.markers for other in self.markers if one is not other):
            raise ValueError(f"markers {markers}: expected that none occurs inside another one")
        self._pattern = re.compile("|".join(map(re.escape, self.markers)))
        self._start = re.compile("[" + re.escape("".join({marker[0] for marker in self.markers})) + "]")
        self._longest = max(map(len, self.markers))

    def split(self, text: str) -> tuple[list[Lexeme], str]:
        """Returns the lexemes of a text, and the suffix that could become a marker.

        >>> lexemes, held = MarkerSplitter("<a>", "</a>").split("x</a>y<")
        >>> [lexeme.text for lexeme in lexemes], held
        (['x', '</a>', 'y'], '<')
        """
        lexemes: list[Lexeme] = []
        position = 0
        for match in self._pattern.finditer(text):
            if match.start() > position:
                lexemes.append(Lexeme(text[position : match.start()], False))
            lexemes.append(Lexeme(match[0], True))
            position = match.end()
        end = len(text)
        for start in self._start.finditer(text, max(position, end - self._longest + 1)):
            if any(marker.startswith(text[start.start() :]) for marker in self.markers):
                end = start.start()
                break
        if end > position:
            lexemes.append(Lexeme(text[position:end], False))
        return lexemes, text[end:]


class FormatParser:
    """Base of the format parsers. A subclass consumes lexemes and closes an output that ended."""

    splitter: MarkerSplitter

    def __init__(self, tools: Tools = ()) -> None:
        self.problems: list[ParseProblem] = []
        self._tools = tools
        self._deltas: list[MessageDelta] = []
        self._held = ""
        """Text that could become a marker."""
        self._held_newlines = ""
        """Newlines that are text unless a call follows, or unless only they follow a call."""
        self._after_call = False
        self._block: list[str] = []
        """Every character since an opener, emitted as text if the block is not a call."""
        self._call_count = 0
        self._truncated = False

    def feed(self, text: str) -> list[MessageDelta]:
        lexemes, self._held = self.splitter.split(self._held + text)
        for lexeme in lexemes:
            self._consume(*lexeme)
        return self._pop_deltas()

    def finish(self, cut: bool) -> list[MessageDelta]:
        self._truncated = cut
        if self._held:
            self._consume(self._held, False)
        self._close()
        if self._held_newlines and not self._after_call:
            self._emit(self._held_newlines)
        return self._pop_deltas()

    def _consume(self, text: str, is_marker: bool) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        """Closes the block at the end of the output, if there is one."""
        raise NotImplementedError

    def _add_text(self, text: str) -> None:
        """Adds text outside any block."""
        body = text.rstrip("\n")
        if body:
            self._deltas.append(MessageDelta(content=self._held_newlines + body))
            self._held_newlines = ""
            self._after_call = False
        self._held_newlines += text[len(body) :]

    def _add_calls(self, *calls: ToolCall) -> None:
        """Emits the block as these calls; its characters and the newlines before it were framing."""
        for call in calls:
            if not is_json_object(call.arguments):
                self.problems.append(ParseProblem.MALFORMED_ARGUMENTS)
            self._deltas.append(MessageDelta(tool_call=call, index=self._call_count))
            self._call_count += 1
        self._block.clear()
        self._held_newlines = ""
        self._after_call = True

    def _flush_block_as_text(self) -> None:
        """Emits the block as text: it is cut or malformed."""
        self.problems.append(ParseProblem.CUT_CALL if self._truncated else ParseProblem.MALFORMED_CALL)
        block = "".join(self._block)
        self._block.clear()
        self._add_text(block)

    def _emit(self, text: str, *, reasoning: bool = False) -> None:
        """Adds exactly this text, newlines included."""
        if text:
            self._deltas.append(
                MessageDelta(reasoning_content=text) if reasoning else MessageDelta(content=text)
            )

    def _pop_deltas(self) -> list[MessageDelta]:
        """Returns the deltas since the last call of this method; adjacent texts are joined."""
        deltas, self._deltas = self._deltas, []
        if len(deltas) < 2:
            return deltas
        joined: list[MessageDelta] = []
        for (is_call, _), group in groupby(deltas, lambda d: (d.tool_call is not None, d.content == "")):
            parts = list(group)
            if is_call:
                joined += parts
            else:
                content = "".join(part.content for part in parts)
                reasoning = "".join(part.reasoning_content for part in parts)
                joined.append(MessageDelta(content, reasoning))
        return joined


class PlainParser:
    """The format without tools: all of an output is text."""

    def __init__(self, tools: Tools = ()) -> None:
        self.problems: list[ParseProblem] = []

    def feed(self, text: str) -> list[MessageDelta]:
        return [MessageDelta(content=text)] if text else []

    def finish(self, cut: bool) -> list[MessageDelta]:
        return []
