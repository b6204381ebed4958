"""What all formats share: the deltas in the making, and what is held back until it is known what it is.

Newlines around a call are framing: those directly before its opener, and those behind its closer up to the
next call or the end. All other newlines are text, and so is a block that turned out to be no call.
"""

from __future__ import annotations

from branchline.chat.parsing.base import Delta, Problem
from branchline.chat.parsing.jsontext import is_object
from branchline.core.message import ToolCall


class Draft:
    """Base of the format parsers; what it says comes out merged, in order."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._deltas: list[Delta] = []
        self._run: list[str] = []
        self._run_is_reasoning = False
        self._gap = ""
        """Newlines that are text unless a call follows or they end what follows a call."""
        self._after_call = False
        self._block: list[str] = []
        """Every character since an opener, to be said as text if no call comes of it."""
        self._calls = 0
        self._cut = False

    def _say(self, text: str) -> None:
        """Text outside any block."""
        body = text.rstrip("\n")
        if body:
            self._write(self._gap + body)
            self._gap = ""
            self._after_call = False
        self._gap += text[len(body) :]

    def _alone(self, text: str) -> list[Delta]:
        """The same for text that is all there is to be said now."""
        body = text.rstrip("\n")
        if not body:
            self._gap += text
            return []
        said, self._gap = self._gap + body, text[len(body) :]
        self._after_call = self._run_is_reasoning = False
        return [Delta(text=said)]

    def _call(self, *calls: ToolCall) -> None:
        """The block is these calls: its characters, and the newlines before it, were framing."""
        self._end_run()
        for call in calls:
            if not is_object(call.arguments):
                self.problems.append(Problem.MALFORMED_ARGUMENTS)
            self._deltas.append(Delta(call=call, index=self._calls))
            self._calls += 1
        self._block.clear()
        self._gap = ""
        self._after_call = True

    def _release(self, problem: Problem | None = Problem.MALFORMED_CALL) -> None:
        """The block is text after all."""
        if problem is not None:
            self.problems.append(Problem.CUT_CALL if self._cut else problem)
        block = "".join(self._block)
        self._block.clear()
        self._say(block)

    def _write(self, text: str, *, reasoning: bool = False) -> None:
        """Exactly this, without looking at newlines."""
        if reasoning is not self._run_is_reasoning:
            self._end_run()
            self._run_is_reasoning = reasoning
        self._run.append(text)

    def _end(self) -> list[Delta]:
        """The last deltas of an output."""
        if not self._after_call:
            self._write(self._gap)
        self._gap = ""
        return self._taken()

    def _taken(self) -> list[Delta]:
        """What has been said since last asked."""
        self._end_run()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _end_run(self) -> None:
        run = "".join(self._run)
        self._run.clear()
        if run:
            self._deltas.append(Delta(reasoning=run) if self._run_is_reasoning else Delta(text=run))
