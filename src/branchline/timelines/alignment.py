"""Locates the end of an earlier call's output in the prompt of a later call that repeats it as text.

If the later prompt begins with the ids of the earlier prompt and the sampled ids, nothing has to be located.
Otherwise the later prompt encodes the same text with other ids, and putting the sampled ids back changes the
context that the later call was sampled in. Each alignment says what has to be allowed for that; nothing is
taken for the end of an output because it looks like one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from branchline.chat.parsing.output_parser import REASONING_MARKERS
from branchline.core.message import Message
from branchline.core.token_arrays import Ids
from branchline.timelines.log import LoggedOutput
from branchline.timelines.prefix_index import starts_with

TokenBytes = Callable[[int], bytes]
_ANCHOR_TOKENS = 8
"""Ids before the first output that have to be the same after a changed beginning."""
_MARK_TOKENS = 3
"""The last ids of a prompt, which open an answer: `<|im_start|>assistant` and a line break."""
_MAX_LAST_IDS = 16
"""Ids at the end of a prompt among which one may end each message; the others open the next answer."""
_REASONING_MARKER = re.compile(
    "|".join(re.escape(marker) for markers in REASONING_MARKERS.values() for marker in markers)
)


class Permission(StrEnum):
    """What a `MergePolicy` can allow; the names are those of its fields."""

    REPAIR = "repair"
    IGNORE_TOOLS = "ignore_tools"
    INEXACT = "inexact"


Permissions = frozenset[Permission]
NOTHING: Permissions = frozenset()


class AlignmentMethod(StrEnum):
    """How the end of an output was located in a prompt, the most certain method first."""

    IDENTICAL = "identical"
    """The prompt starts with the ids of the earlier prompt and the sampled ids."""
    ANCHOR = "anchor"
    """From the first output on the same ids, after a beginning that changed (other tools, another date)."""
    BYTES = "bytes"
    """Other ids with the same bytes."""
    STOP_TOKEN = "stop_token"
    """Other ids, up to the known stop token of the output."""
    ESTIMATE = "estimate"
    """Estimated: with a tokenizer from the text of the logged answer; else from an id that ends every
    message, or from text lengths."""


_BY_CERTAINTY = list(AlignmentMethod)
UNCERTAIN_METHODS = frozenset((AlignmentMethod.STOP_TOKEN, AlignmentMethod.ESTIMATE))
"""Methods by which the prompt may show another text than the sampled ids."""


@dataclass(frozen=True)
class Alignment:
    """The end of an output in a later prompt: `prompt[end:]` follows the output."""

    end: int
    method: AlignmentMethod
    first_output: int | None = None
    """Where the first output of the path begins in the prompt; None if that is not known."""
    needs: Permissions = NOTHING
    """What has to be allowed for putting the sampled ids back."""


@dataclass(frozen=True)
class PathReasoning:
    """Where a path has reasoning, which a template may drop from a later prompt."""

    in_context: bool = False
    """Before its first output."""
    in_outputs: bool = False
    """From its first output on, without its last one."""
    in_output: bool = False
    """In its last output."""


@dataclass(frozen=True)
class EarlierPath:
    """The path that a later call may continue: an earlier prompt and one of its outputs."""

    prompt: Ids
    output: LoggedOutput
    sampled: Ids
    first_output: int | None
    """Where the first output of the path begins in the earlier prompt; its end if there is none before it."""
    reasoning: PathReasoning = PathReasoning()


@dataclass(frozen=True)
class Aligner:
    """Locates outputs with what is known about tokens."""

    token_bytes: TokenBytes | None = None
    stop_ids: frozenset[int] = frozenset()

    def align(
        self, prompt: Ids, path: EarlierPath, following: Sequence[Message], *, other_tools: bool = False
    ) -> Alignment | None:
        """Returns where `path` ends in a prompt, or None if the prompt does not show its whole text.

        `following` are the messages after the output; `other_tools` says that the later call has another
        tool list or other template arguments.
        """
        start, method, first_output, needs = self._find_start(prompt, path, following, other_tools)
        if method == AlignmentMethod.ESTIMATE and (path.reasoning.in_context or path.reasoning.in_outputs):
            return None
        end, end_method = self._find_end(prompt, start, path, following)
        is_uncertain = end_method in UNCERTAIN_METHODS
        if is_uncertain and (path.reasoning.in_output or self._shows_reasoning(path.sampled)):
            # The template has probably dropped the reasoning.
            return None
        if end_method in (AlignmentMethod.BYTES, AlignmentMethod.STOP_TOKEN):
            needs |= {Permission.REPAIR}
        elif end_method == AlignmentMethod.ESTIMATE:
            needs |= {Permission.INEXACT}
        least_certain = max(method, end_method, key=_BY_CERTAINTY.index)
        return Alignment(end, least_certain, first_output, needs)

    def _find_start(
        self, prompt: Ids, path: EarlierPath, following: Sequence[Message], other_tools: bool
    ) -> tuple[int, AlignmentMethod, int | None, Permissions]:
        """Returns where the output begins in the later prompt, how that was found, where the first output of
        the path begins, and what has to be allowed."""
        before, first_output = path.prompt, path.first_output
        if starts_with(prompt, before):
            return len(before), AlignmentMethod.IDENTICAL, first_output, NOTHING
        if self.token_bytes is not None:
            start = _end_by_bytes(prompt, 0, before, self.token_bytes)
            if start is not None:
                first = None
                if first_output is not None:
                    first = _end_by_bytes(prompt, 0, before[:first_output], self.token_bytes)
                return start, AlignmentMethod.BYTES, first, frozenset((Permission.REPAIR,))
        changed_start = frozenset((Permission.IGNORE_TOOLS if other_tools else Permission.INEXACT,))
        if first_output is not None and not path.reasoning.in_context:
            answers = sum(message.role == "assistant" for message in following)
            shifted = _find_first_output(prompt, before, first_output, answers)
            if shifted is not None:
                start = shifted + len(before) - first_output
                return start, AlignmentMethod.ANCHOR, shifted, changed_start
        return (
            min(len(before), len(prompt)),
            AlignmentMethod.ESTIMATE,
            None,
            changed_start | {Permission.INEXACT},
        )

    def _find_end(
        self, prompt: Ids, start: int, path: EarlierPath, following: Sequence[Message]
    ) -> tuple[int, AlignmentMethod]:
        sampled, output = path.sampled, path.output
        if starts_with(prompt[start:], sampled):
            return start + len(sampled), AlignmentMethod.IDENTICAL
        if self.token_bytes is not None:
            end = _end_by_bytes(prompt, start, sampled, self.token_bytes)
            if end is not None:
                return end, AlignmentMethod.BYTES
        end = self._end_by_stop_token(prompt, start, sampled, output)
        if end is not None:
            return end, AlignmentMethod.STOP_TOKEN
        end = self._end_by_text(prompt, start, sampled, output.message)
        if end is None:
            end = _end_by_last_id(prompt, start, path, len(following))
        if end is None:
            end = _end_by_estimate(prompt, start, output.message, following)
        return end, AlignmentMethod.ESTIMATE

    def _end_by_text(self, prompt: Ids, start: int, sampled: Ids, message: Message) -> int | None:
        """Returns the position after the text of an answer that has other ids: a stop string was cut off, or
        white space. Its stop token is included if the answer ended with the same one."""
        if self.token_bytes is None or message.tool_calls or not message.content.strip():
            return None
        for text in (message.content, message.content.strip()):
            end = _end_of_text(prompt, start, text.encode("utf-8", "replace"), self.token_bytes)
            if end is not None:
                is_stop = len(sampled) > 0 and int(sampled[-1]) in self.stop_ids
                return end + (is_stop and end < len(prompt) and int(prompt[end]) == int(sampled[-1]))
        return None

    def _shows_reasoning(self, sampled: Ids) -> bool:
        """Whether sampled ids have reasoning that the logged message may lack."""
        if self.token_bytes is None:
            return False
        text = b"".join(map(self.token_bytes, sampled.tolist())).decode("utf-8", "replace")
        return _REASONING_MARKER.search(text) is not None

    def _end_by_stop_token(self, prompt: Ids, start: int, sampled: Ids, output: LoggedOutput) -> int | None:
        """Returns the position after the first stop token, if the output ended with the same one."""
        if output.is_cut or output.finish_reason == "length":
            return None
        ends = np.flatnonzero(np.isin(sampled, list(self.stop_ids)))
        if len(ends) != 1 or int(ends[0]) != len(sampled) - 1:
            return None
        stops = np.flatnonzero(np.isin(prompt[start:], list(self.stop_ids)))
        if not len(stops) or prompt[start + int(stops[0])] != sampled[-1]:
            return None
        end = start + int(stops[0]) + 1
        if self.token_bytes is not None:
            shown, written = (
                b"".join(map(self.token_bytes, ids.tolist())).split() for ids in (prompt[start:end], sampled)
            )
            if b"".join(shown) != b"".join(written):
                return None
        return end


def has_reasoning(message: Message) -> bool:
    """Whether a message has reasoning, also if a server left it in the text."""
    return bool(message.reasoning_content) or _REASONING_MARKER.search(message.content) is not None


def _end_by_bytes(prompt: Ids, start: int, ids: Ids, token_bytes: TokenBytes) -> int | None:
    """Returns the position after the ids from `start` on whose bytes are those of `ids`; None if they
    differ or a token crosses the end."""
    return _end_of_text(prompt, start, b"".join(map(token_bytes, ids.tolist())), token_bytes)


def _end_of_text(prompt: Ids, start: int, expected: bytes, token_bytes: TokenBytes) -> int | None:
    read = 0
    for position, token in enumerate(prompt[start:].tolist(), start=start):
        if read == len(expected):
            return position
        data = token_bytes(token)
        if expected[read : read + len(data)] != data:
            return None
        read += len(data)
    return len(prompt) if read == len(expected) else None


def _find_first_output(prompt: Ids, before: Ids, first_output: int, later_answers: int) -> int | None:
    """Returns where the first output of a path begins in a prompt with another beginning: after as many
    generation prompts as in the earlier prompt. Ids that look like the output are not searched for: they may
    be those of a later turn. None if other ids stand just before it or from it on, or if too few generation
    prompts follow for `later_answers`, the number of answers after the path."""
    mark = before[max(0, first_output - _MARK_TOKENS) : first_output]
    number, starts = len(_occurrences(before[:first_output], mark)), _occurrences(prompt, mark)
    if not 0 < number <= len(starts):
        return None
    shifted = starts[number - 1] + len(mark)
    end = shifted + len(before) - first_output
    begin = shifted - min(first_output, _ANCHOR_TOKENS)
    if begin < 0 or not np.array_equal(prompt[begin:end], before[max(0, first_output - _ANCHOR_TOKENS) :]):
        return None
    is_cut = starts[-1] + len(mark) == len(prompt) and sum(start >= end for start in starts) <= later_answers
    return None if is_cut else shifted


def _occurrences(ids: Ids, anchor: Ids) -> list[int]:
    if not len(anchor):
        return []
    starts = np.flatnonzero(ids[: max(0, len(ids) - len(anchor) + 1)] == anchor[0]).tolist()
    return [start for start in starts if np.array_equal(ids[start : start + len(anchor)], anchor)]


def _end_by_last_id(prompt: Ids, start: int, path: EarlierPath, following: int) -> int | None:
    """Returns where an output ends if each message ends with one id, which is unknown: it stands once for the
    output and for each message after it, and in both prompts before the same last ids. It belongs to the
    output if the output ended with it; else the first of such ids is the end. None if there is none."""
    tail = prompt[start:]
    found: list[int] = []
    for distance in range(1, min(_MAX_LAST_IDS, len(path.prompt), len(tail)) + 1):
        last = prompt[-distance]
        if path.prompt[-distance] != last:
            break
        ends = np.flatnonzero(tail == last)
        if len(ends) == 1 + following:
            found.append(start + int(ends[0]))
            if len(path.sampled) and path.sampled[-1] == last:
                return found[-1] + 1
    return min(found, default=None)


def _end_by_estimate(prompt: Ids, start: int, message: Message, following: Sequence[Message]) -> int:
    tail = len(prompt) - start
    length = _text_length(message)
    share = length / max(1, length + sum(_text_length(message) for message in following))
    # Each side gets at least one token if there are enough.
    most = tail - 1 if following and tail > 1 else tail
    return start + min(most, max(1 if tail else 0, round(tail * share)))


def _text_length(message: Message) -> int:
    return (
        len(message.content)
        + len(message.reasoning_content)
        + sum(len(call.arguments) for call in message.tool_calls)
    )
