"""Reasoning before an answer: one region at the start of an output, followed by the tool format.

The newlines that templates write around it are framing: after the opener, before the closer and after the
closer. So is whitespace before the opener. A tool call inside the reasoning is not a call.
"""

from __future__ import annotations

from enum import Enum

from branchline.chat.parsing.base import MessageDelta, ParseProblem, TextParser
from branchline.chat.parsing.format_parser import Lexeme, Lexer

REASONING_MARKERS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
"""Opener and closer of each reasoning format."""


class _ReasoningState(Enum):
    START = 0
    OPENED = 1
    INSIDE = 2
    CLOSED = 3
    ANSWER = 4


class ReasoningParser:
    """Parses reasoning, then passes the rest on. `starts_in_reasoning`: the prompt contains the opener."""

    def __init__(
        self, inner: TextParser, markers: tuple[str, str], *, starts_in_reasoning: bool = False
    ) -> None:
        self._inner = inner
        self._open, self._close = markers
        self._lexer = Lexer(*markers)
        self._state = _ReasoningState.OPENED if starts_in_reasoning else _ReasoningState.START
        self._may_open_again = starts_in_reasoning
        """Some models repeat the opener that the prompt contains."""
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
        for lexeme in self._lexer.feed(text):
            self._consume(lexeme, reasoning, answer)
        if self._state is _ReasoningState.ANSWER:
            # Markers, complete or partial, have no meaning in the answer.
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
        reasoning_text, text = "".join(reasoning), "".join(answer)
        deltas = [MessageDelta(reasoning_content=reasoning_text)] if reasoning_text else []
        return [*deltas, *self._inner.feed(text)] if text else deltas

    def _consume(self, lexeme: Lexeme, reasoning: list[str], answer: list[str]) -> None:
        text = lexeme.text
        if self._state is _ReasoningState.START:
            if lexeme.is_marker and text == self._open:
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
        elif lexeme.is_marker and text == self._close:
            self._held_newlines = ""
            self._state = _ReasoningState.CLOSED
        elif lexeme.is_marker and self._state is _ReasoningState.OPENED and self._may_open_again:
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
