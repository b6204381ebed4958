"""Thinking in front of an answer: one region at the start of an output, then whatever the format reads.

The newlines that templates put around it are framing: those behind the opener, before the closer and
behind the closer. Whitespace before the opener is too. A call drafted inside it is no call.
"""

from __future__ import annotations

from enum import Enum

from branchline.chat.parsing.base import MessageDelta, ParseProblem, TextParser
from branchline.chat.parsing.lexer import Lexeme, Lexer

REASONING_MARKERS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
"""The markers of each reasoning format."""


class _ReasoningState(Enum):
    START = 0
    OPENED = 1
    INSIDE = 2
    CLOSED = 3
    ANSWER = 4


class ReasoningParser:
    """A reasoning layer in front of a tool layer; `starts_inside` where the prompt has opened it."""

    def __init__(
        self, inner: TextParser, markers: tuple[str, str], *, starts_in_reasoning: bool = False
    ) -> None:
        self._inner = inner
        self._open, self._close = markers
        self._lexer = Lexer(*markers)
        self._state = _ReasoningState.OPENED if starts_in_reasoning else _ReasoningState.START
        self._may_open_again = starts_in_reasoning
        """Some models open what the prompt has opened already."""
        self._held_newlines = ""
        self._problems: list[ParseProblem] = []

    @property
    def problems(self) -> list[ParseProblem]:
        return [*self._problems, *self._inner.problems]

    def feed(self, text: str) -> list[MessageDelta]:
        return self._inner.feed(text) if self._state is _ReasoningState.ANSWER else self._consume_all(text)

    def _consume_all(self, text: str) -> list[MessageDelta]:
        reasoning: list[str] = []
        answer: list[str] = []
        for piece in self._lexer.feed(text):
            self._consume(piece, reasoning, answer)
        if self._state is _ReasoningState.ANSWER:
            # No marker means anything any more, nor does one under way.
            answer.append(self._lexer.finish())
        return self._deltas(reasoning, answer)

    def finish(self, cut: bool) -> list[MessageDelta]:
        reasoning: list[str] = []
        answer: list[str] = []
        held = self._lexer.finish()
        if held:
            self._consume(Lexeme(held, False), reasoning, answer)
        if self._state in (_ReasoningState.OPENED, _ReasoningState.INSIDE):
            self._problems.append(ParseProblem.UNCLOSED_REASONING)
            reasoning.append(self._held_newlines)
        elif self._state is _ReasoningState.START:
            answer.append(self._held_newlines)
        return [*self._deltas(reasoning, answer), *self._inner.finish(cut)]

    def _deltas(self, reasoning: list[str], answer: list[str]) -> list[MessageDelta]:
        thought, text = "".join(reasoning), "".join(answer)
        deltas = [MessageDelta(reasoning_content=thought)] if thought else []
        return [*deltas, *self._inner.feed(text)] if text else deltas

    def _consume(self, piece: Lexeme, reasoning: list[str], answer: list[str]) -> None:
        text = piece.text
        if self._state is _ReasoningState.START:
            if piece.is_marker and text == self._open:
                self._held_newlines = ""
                self._state = _ReasoningState.OPENED
            elif text.isspace():
                self._held_newlines += text
            else:
                answer.append(self._held_newlines + text)
                self._state = _ReasoningState.ANSWER
        elif self._state is _ReasoningState.ANSWER:
            answer.append(text)
        elif self._state is _ReasoningState.CLOSED:
            text = text.lstrip("\n")
            if text:
                answer.append(text)
                self._state = _ReasoningState.ANSWER
        elif piece.is_marker and text == self._close:
            self._held_newlines = ""
            self._state = _ReasoningState.CLOSED
        elif piece.is_marker and self._state is _ReasoningState.OPENED and self._may_open_again:
            self._may_open_again = False
        else:
            self._add_reasoning(text, reasoning)

    def _add_reasoning(self, text: str, reasoning: list[str]) -> None:
        if self._state is _ReasoningState.OPENED:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        if body:
            self._state = _ReasoningState.INSIDE
            reasoning.append(self._held_newlines + body)
            self._held_newlines = ""
        self._held_newlines += text[len(body) :]
