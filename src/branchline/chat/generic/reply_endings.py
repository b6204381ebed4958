"""Finds out how replies end: the tokens that stop an output, and the tokens that end a reply in a prompt.

The files of a model declare its stop ids. A template adds one only for a shape of reply (text, reasoning,
calls, an answer to a tool result) that ends with none of them, and never a token after which a reply of any
shape continues: it would cut outputs. The two kinds of token may differ: gpt-oss samples `<|return|>`, where
its template writes `<|end|>` once more messages follow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from branchline.chat.generic.template_probe import (
    ARGUMENT_WORD,
    ASSISTANT,
    ASSISTANT_WITH_CALL,
    ASSISTANT_WITH_REASONING,
    ASSISTANT_WITH_REASONING_AND_CALL,
    ASSISTANT_WITH_TEXT_AND_CALL,
    ASSISTANT_WITH_TWO_CALLS,
    NEXT_USER,
    OTHER_ARGUMENT_WORD,
    OTHER_TOOL_RESULT,
    REASONING_WORD,
    TOOL_RESULT,
    TOOLS,
    USER,
    TemplateProbe,
)
from branchline.chat.segment_encoder import SegmentEncoder
from branchline.core.message import Message


@dataclass(frozen=True)
class ReplyEndings:
    """How the replies of one template end."""

    stop_ids: frozenset[int]
    """The stop ids that the files of the model do not declare."""
    text_terminator_ids: frozenset[int]
    """The tokens that end a reply in a prompt; several if it ends with the opener of the next message."""
    call_terminator_ids: frozenset[int]
    """The tokens that end a reply with calls in a prompt."""
    stop_opens_next_message: bool
    """Replies have no end of their own: the model stops by opening the next message (GLM)."""
    unstopped_shapes: tuple[str, ...]
    """The shapes of replies that the template ends with no stop id."""

    @property
    def terminator_ids(self) -> frozenset[int]:
        return self.text_terminator_ids | self.call_terminator_ids


@dataclass(frozen=True)
class _ReplyShape:
    """A reply in a conversation."""

    name: str
    before: Sequence[Message]
    reply: Message
    following: Sequence[Message]

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        return TOOLS if any(message.tool_calls for message in (*self.before, self.reply)) else ()


_WORDS = (REASONING_WORD, ASSISTANT.content, ARGUMENT_WORD, OTHER_ARGUMENT_WORD)
"""The words of a reply, in the order in which a model writes them."""
_AFTER_RESULT = (USER, ASSISTANT_WITH_CALL, TOOL_RESULT)
_NEXT, _RESULT, _RESULTS = [NEXT_USER], [TOOL_RESULT], [TOOL_RESULT, OTHER_TOOL_RESULT]
_SHAPES = (
    _ReplyShape("text", [USER], ASSISTANT, _NEXT),
    _ReplyShape("text with reasoning", [USER], ASSISTANT_WITH_REASONING, _NEXT),
    _ReplyShape("text after a tool result", _AFTER_RESULT, ASSISTANT, _NEXT),
    _ReplyShape("text with reasoning after a tool result", _AFTER_RESULT, ASSISTANT_WITH_REASONING, _NEXT),
    _ReplyShape("a tool call", [USER], ASSISTANT_WITH_CALL, _RESULT),
    _ReplyShape("text and a tool call", [USER], ASSISTANT_WITH_TEXT_AND_CALL, _RESULT),
    _ReplyShape("reasoning and a tool call", [USER], ASSISTANT_WITH_REASONING_AND_CALL, _RESULT),
    _ReplyShape("two tool calls", [USER], ASSISTANT_WITH_TWO_CALLS, _RESULTS),
)
"""Texts come first: whether a call ends with the opener of the next message depends on them."""


@dataclass(frozen=True)
class _ReplyTail:
    """The texts that a template writes after the last word of a reply."""

    shape: _ReplyShape
    inside: frozenset[int]
    """The tokens after which the reply continues."""
    at_end: str | None
    """If no message follows; None if the template adds a generation prompt there."""
    before_prompt: str
    """If only a generation prompt follows, without it."""
    before_next: str
    """Up to the content of the next message."""

    @property
    def has_calls(self) -> bool:
        return bool(self.shape.reply.tool_calls)


def probe_reply_endings(
    probe: TemplateProbe, encoder: SegmentEncoder, declared: Iterable[int]
) -> ReplyEndings:
    """Returns how replies end, given the stop ids that the files of the model declare."""
    return _EndingFinder(probe, encoder).find(frozenset(declared))


class _EndingFinder:
    """Compares what a template writes after replies of every shape."""

    def __init__(self, probe: TemplateProbe, encoder: SegmentEncoder) -> None:
        self._probe = probe
        self._encoder = encoder
        self._prompt = probe.traits.generation_prompt
        self._tails = [tail for shape in _SHAPES if (tail := self._probe_tail(shape)) is not None]
        # A reply continues after the tokens inside it, and after those of the generation prompt.
        self._inside = frozenset(self._tokens(self._prompt)).union(*(tail.inside for tail in self._tails))

    def find(self, declared: frozenset[int]) -> ReplyEndings:
        stops = set(declared)
        unstopped = []
        opens_next_message = False
        for tail in self._tails:
            if stops.isdisjoint(self._tokens((tail.at_end or "") + tail.before_next)):
                stop = self._find_stop(tail, opens_next_message)
                if stop is None:
                    unstopped.append(tail.shape.name)
                else:
                    stops.add(stop)
            opens_next_message = opens_next_message or (not tail.has_calls and self._is_opener(tail, stops))
        terminators: dict[bool, set[int]] = {False: set(), True: set()}
        for tail in self._tails:
            terminator = next((token for token in self._tokens(tail.before_next) if token in stops), None)
            if terminator is None and not tail.has_calls:
                terminator = self._last_token(tail.before_prompt)
            if terminator is not None:
                terminators[tail.has_calls].add(terminator)
        return ReplyEndings(
            frozenset(stops) - declared,
            frozenset(terminators[False]),
            frozenset(terminators[True]),
            opens_next_message,
            tuple(unstopped),
        )

    def _find_stop(self, tail: _ReplyTail, opens_next_message: bool) -> int | None:
        """Returns the token that ends a reply of this shape, if no reply continues after it."""
        candidates: list[int | None] = []
        if tail.at_end is None:
            # The end of the reply is not visible, so the token must follow replies of every shape.
            shared = frozenset.intersection(*(frozenset(self._tokens(t.before_next)) for t in self._tails))
            following = [token for token in self._tokens(tail.before_next) if token in shared]
            # A token that ends user messages too ends the whole reply, and not a part of it.
            ends = self._tokens(self._text_after_user(tail.shape))
            candidates += sorted(following, key=lambda token: token not in ends)
        else:
            candidates.append(self._last_token(tail.at_end))
            if opens_next_message or not tail.has_calls:
                candidates.append(self._next_token(tail))
        return next((token for token in candidates if token is not None and token not in self._inside), None)

    def _is_opener(self, tail: _ReplyTail, stops: Collection[int]) -> bool:
        """Whether the stop after a reply is not its own end, but all that opens the next message."""
        following = self._tokens(tail.before_next)
        own = self._tokens((tail.at_end or "") + tail.before_prompt)
        return bool(following) and following[-1] in stops and following[-1] not in own

    # -- probing -------------------------------------------------------------------------------------

    def _probe_tail(self, shape: _ReplyShape) -> _ReplyTail | None:
        """Returns what the template writes after a reply, or None if it does not show it in order."""
        conversation, render = [*shape.before, shape.reply], self._probe.render_or_empty
        followed = self._split(render([*conversation, *shape.following], shape.tools), shape)
        if followed is None:
            return None
        ended = self._split(render(conversation, shape.tools, add_generation_prompt=False), shape)
        prompted = self._split(render(conversation, shape.tools), shape)
        bodies = [part[0] for part in (followed, ended, prompted) if part is not None]
        next_start = followed[1].find(shape.following[0].content)
        at_end = ended[1] if ended is not None else ""
        before_prompt = prompted[1] if prompted is not None else ""
        before_next = followed[1][:next_start] if next_start >= 0 else ""
        return _ReplyTail(
            shape,
            frozenset(token for body in bodies for token in self._tokens(body)),
            None if self._ends_with_prompt(at_end, before_next, shape) else at_end,
            before_prompt.removesuffix(self._prompt),
            before_next,
        )

    def _split(self, text: str, shape: _ReplyShape) -> tuple[str, str] | None:
        """Returns the text of a reply up to its last word, and the text after it. None if the reply is not
        shown, or not in the order in which a model writes it: reasoning, text, calls."""
        start = text.rfind(shape.before[-1].content)
        places = [text.find(word, max(0, start)) for word in _WORDS]
        shown = [place for place in places if place >= 0]
        is_shown = places[_WORDS.index(ARGUMENT_WORD if shape.reply.tool_calls else ASSISTANT.content)] >= 0
        if start < 0 or not is_shown or shown != sorted(shown):
            return None
        prompt_start = text.find(self._prompt, start, shown[0]) if self._prompt else -1
        body_start = prompt_start + len(self._prompt) if prompt_start >= 0 else shown[0]
        end = shown[-1] + len(_WORDS[places.index(shown[-1])])
        return text[body_start:end], text[end:]

    def _ends_with_prompt(self, at_end: str, before_next: str, shape: _ReplyShape) -> bool:
        """Whether the template writes a generation prompt, or a part of it, that was not requested."""
        if self._prompt and before_next.startswith(at_end):
            return False
        after_user = self._text_after_user(shape)
        pairs = zip(reversed(at_end), reversed(after_user), strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return bool(self._tokens(at_end[len(at_end) - common :]))

    def _text_after_user(self, shape: _ReplyShape) -> str:
        text = self._probe.render_or_empty([USER], shape.tools, add_generation_prompt=False)
        return text[text.rfind(USER.content) + len(USER.content) :]

    # -- tokens --------------------------------------------------------------------------------------

    def _tokens(self, text: str) -> list[int]:
        """Returns the control tokens in a text."""
        is_control = self._encoder.is_control
        return [token for _, _, token in self._encoder.find_added_tokens(text) if is_control[token]]

    def _last_token(self, text: str) -> int | None:
        """Returns the control token that ends a text, apart from whitespace."""
        last = None
        for _, end, token in self._encoder.find_added_tokens(text):
            if self._encoder.is_control[token]:
                last = token if not text[end:].strip() else None
        return last

    def _next_token(self, tail: _ReplyTail) -> int | None:
        """Returns the token that follows the end of a reply directly.

        If the reply ends with words of the template (`</assistant>` in ordinary tokens), they end it.
        """
        ending = (tail.at_end or "").rstrip()
        closed = max((end for _, end, _ in self._encoder.find_added_tokens(ending)), default=0)
        if not tail.before_next.startswith(ending) or any(char.isalnum() for char in ending[closed:]):
            return None
        rest = tail.before_next[len(ending) :].lstrip()
        first = next(self._encoder.find_added_tokens(rest), None)
        return first[2] if first is not None and first[0] == 0 else None
