"""Thinking in front of an answer: one region at the start of an output, then whatever the format reads.

The newlines that templates put around it are framing: those behind the opener, before the closer and
behind the closer. Whitespace before the opener is too. A call drafted inside it is no call.
"""

from __future__ import annotations

from enum import Enum

from branchline.chat.parsing.base import Delta, Problem, TextParser
from branchline.chat.parsing.lexer import Lexer, Piece

REASONING: dict[str, tuple[str, str]] = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""The markers of each reasoning format."""


class _State(Enum):
    START = 0
    OPENED = 1
    INSIDE = 2
    CLOSED = 3
    ANSWER = 4


class ReasoningParser:
    """A reasoning layer in front of a tool layer; `starts_inside` where the prompt has opened it."""

    def __init__(self, inner: TextParser, markers: tuple[str, str], *, starts_inside: bool = False) -> None:
        self._inner = inner
        self._open, self._close = markers
        self._lexer = Lexer(*markers)
        self._state = _State.OPENED if starts_inside else _State.START
        self._may_open_again = starts_inside
        """Some models open what the prompt has opened already."""
        self._gap = ""
        self._problems: list[Problem] = []

    @property
    def problems(self) -> list[Problem]:
        return [*self._problems, *self._inner.problems]

    def feed(self, text: str) -> list[Delta]:
        return self._inner.feed(text) if self._state is _State.ANSWER else self._read(text)

    def _read(self, text: str) -> list[Delta]:
        reasoning: list[str] = []
        answer: list[str] = []
        for piece in self._lexer.feed(text):
            self._take(piece, reasoning, answer)
        if self._state is _State.ANSWER:
            # No marker means anything any more, nor does one under way.
            answer.append(self._lexer.finish())
        return self._said(reasoning, answer)

    def finish(self, cut: bool) -> list[Delta]:
        reasoning: list[str] = []
        answer: list[str] = []
        held = self._lexer.finish()
        if held:
            self._take(Piece(held, False), reasoning, answer)
        if self._state in (_State.OPENED, _State.INSIDE):
            self._problems.append(Problem.UNCLOSED_REASONING)
            reasoning.append(self._gap)
        elif self._state is _State.START:
            answer.append(self._gap)
        return [*self._said(reasoning, answer), *self._inner.finish(cut)]

    def _said(self, reasoning: list[str], answer: list[str]) -> list[Delta]:
        thought, text = "".join(reasoning), "".join(answer)
        deltas = [Delta(reasoning=thought)] if thought else []
        return [*deltas, *self._inner.feed(text)] if text else deltas

    def _take(self, piece: Piece, reasoning: list[str], answer: list[str]) -> None:
        text = piece.text
        if self._state is _State.START:
            if piece.is_marker and text == self._open:
                self._gap = ""
                self._state = _State.OPENED
            elif text.isspace():
                self._gap += text
            else:
                answer.append(self._gap + text)
                self._state = _State.ANSWER
        elif self._state is _State.ANSWER:
            answer.append(text)
        elif self._state is _State.CLOSED:
            text = text.lstrip("\n")
            if text:
                answer.append(text)
                self._state = _State.ANSWER
        elif piece.is_marker and text == self._close:
            self._gap = ""
            self._state = _State.CLOSED
        elif piece.is_marker and self._state is _State.OPENED and self._may_open_again:
            self._may_open_again = False
        else:
            self._think(text, reasoning)

    def _think(self, text: str, reasoning: list[str]) -> None:
        if self._state is _State.OPENED:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        if body:
            self._state = _State.INSIDE
            reasoning.append(self._gap + body)
            self._gap = ""
        self._gap += text[len(body) :]
