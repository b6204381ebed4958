"""No tools: all of it is text, exactly."""

from __future__ import annotations

from branchline.chat.parsing.base import MessageDelta, ParseProblem


class PlainParser:
    """Says at once what it is fed."""

    def __init__(self) -> None:
        self.problems: list[ParseProblem] = []

    def feed(self, text: str) -> list[MessageDelta]:
        return [MessageDelta(content=text)] if text else []

    def finish(self, cut: bool) -> list[MessageDelta]:
        return []
