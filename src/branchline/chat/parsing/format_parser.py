"""What all formats share: the deltas in the making, and what is held back until it is known what it is.

Newlines around a call are framing: those directly before its opener, and those behind its closer up to the
next call or the end. All other newlines are text, and so is a block that turned out to be no call.
"""

from __future__ import annotations

from branchline.chat.parsing.base import MessageDelta, ParseProblem
from branchline.chat.parsing.json_scan import is_json_object
from branchline.core.message import ToolCall


class FormatParser:
    """Base of the format parsers; what it says comes out merged, in order."""

    def __init__(self) -> None:
        self.problems: list[ParseProblem] = []
        self._deltas: list[MessageDelta] = []
        self._pending: list[str] = []
        self._pending_is_reasoning = False
        self._held_newlines = ""
        """Newlines that are text unless a call follows or they end what follows a call."""
        self._after_call = False
        self._block: list[str] = []
        """Every character since an opener, to be said as text if no call comes of it."""
        self._call_count = 0
        self._truncated = False

    def _add_text(self, text: str) -> None:
        """Text outside any block."""
        body = text.rstrip("\n")
        if body:
            self._append(self._held_newlines + body)
            self._held_newlines = ""
            self._after_call = False
        self._held_newlines += text[len(body) :]

    def _text_only_deltas(self, text: str) -> list[MessageDelta]:
        """The same for text that is all there is to be said now."""
        body = text.rstrip("\n")
        if not body:
            self._held_newlines += text
            return []
        said, self._held_newlines = self._held_newlines + body, text[len(body) :]
        self._after_call = self._pending_is_reasoning = False
        return [MessageDelta(content=said)]

    def _add_calls(self, *calls: ToolCall) -> None:
        """The block is these calls: its characters, and the newlines before it, were framing."""
        self._flush_pending()
        for call in calls:
            if not is_json_object(call.arguments):
                self.problems.append(ParseProblem.MALFORMED_ARGUMENTS)
            self._deltas.append(MessageDelta(tool_call=call, index=self._call_count))
            self._call_count += 1
        self._block.clear()
        self._held_newlines = ""
        self._after_call = True

    def _flush_block_as_text(self, problem: ParseProblem | None = ParseProblem.MALFORMED_CALL) -> None:
        """The block is text after all."""
        if problem is not None:
            self.problems.append(ParseProblem.CUT_CALL if self._truncated else problem)
        block = "".join(self._block)
        self._block.clear()
        self._add_text(block)

    def _append(self, text: str, *, reasoning: bool = False) -> None:
        """Exactly this, without looking at newlines."""
        if reasoning is not self._pending_is_reasoning:
            self._flush_pending()
            self._pending_is_reasoning = reasoning
        self._pending.append(text)

    def _final_deltas(self) -> list[MessageDelta]:
        """The last deltas of an output."""
        if not self._after_call:
            self._append(self._held_newlines)
        self._held_newlines = ""
        return self._pop_deltas()

    def _pop_deltas(self) -> list[MessageDelta]:
        """What has been said since last asked."""
        self._flush_pending()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _flush_pending(self) -> None:
        run = "".join(self._pending)
        self._pending.clear()
        if run:
            self._deltas.append(
                MessageDelta(reasoning_content=run)
                if self._pending_is_reasoning
                else MessageDelta(content=run)
            )
