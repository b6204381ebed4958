"""No tools: all of it is text, exactly."""

from __future__ import annotations

from branchline.chat.parsing.base import Delta, Problem


class PlainParser:
    """Says at once what it is fed."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def feed(self, text: str) -> list[Delta]:
        return [Delta(text=text)] if text else []

    def finish(self, cut: bool) -> list[Delta]:
        return []
