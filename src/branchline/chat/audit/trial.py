"""Conversations to try a chat template on, and what it makes of them.

Every message says a word that no template writes by itself: where the word comes out, where it does not and
what stands before it is what the template did. Each text is rendered by both engines and compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from branchline.chat.audit.findings import Evidence
from branchline.chat.base import Shown
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.generic.dialect import Dialect
from branchline.chat.generic.template import ChatTemplate
from branchline.chat.generic.voice import EMPTY_THINK
from branchline.core.errors import TemplateError
from branchline.core.message import Message, ToolCall
from branchline.core.runs import Ids, as_ids

Raw = dict[str, Any]

CLOCK = datetime(2001, 2, 3, 4, 5, 6)
OTHER_CLOCK = datetime(2019, 11, 28, 17, 46, 39)
THOUGHT, ARGUMENT = "zqthought", "zqargument"
TOOL, PURPOSE = "zqlook", "zqpurpose"
TOOLS: tuple[Raw, ...] = (
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": PURPOSE,
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    },
)
CALL = ToolCall(TOOL, f'{{"at": "{ARGUMENT}"}}', "abcdefgh1")
OTHER_CALL = ToolCall(TOOL, '{"at": "zqother"}', "abcdefgh2")

SYSTEM = Message("system", "zqsystem")
ASKS = Message("user", "zqask")
SAYS = Message("assistant", "zqsaid")
THINKS = Message("assistant", "zqsaid", reasoning=THOUGHT)
CALLS = Message("assistant", calls=(CALL,))
CALLS_TWICE = Message("assistant", calls=(CALL, OTHER_CALL))
RESULT = Message("tool", "zqresult", answers=CALL.id, name=TOOL)
OTHER_RESULT = Message("tool", "zqmoreresult", answers=OTHER_CALL.id, name=TOOL)
ASKS_MORE = Message("user", "zqmore")

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")
_BEFORE, _AFTER = 40, 80
_REFUSALS = (
    "the chat template refused the conversation: ",
    "the chat template failed on the conversation: ",
)


class Trial:
    """One codec's templates, tried."""

    def __init__(self, codec: GenericCodec) -> None:
        self.codec = codec
        self.differences: list[Evidence] = []
        """Where minijinja and jinja2 wrote different texts."""
        self._exact: dict[ChatTemplate, ChatTemplate] = {}

    @property
    def dialect(self) -> Dialect:
        """How the template that is used with tools wants to be spoken to."""
        return self.codec.dialect(self.codec.tokenizer.template(tools=True))

    @cached_property
    def opener(self) -> str:
        """The generation prompt, also of a template that writes it without being asked."""
        return self.codec.decode(self.codec.extend((), [Shown(ASKS)]).opening)

    def show(
        self,
        messages: Sequence[Message],
        *,
        tools: bool = False,
        asked: bool = False,
        now: datetime = CLOCK,
    ) -> str:
        """A conversation as text; `asked`: a generation prompt is asked for."""
        dialect = self.codec.dialect(self.codec.tokenizer.template(tools=tools))
        return self.write(dialect.write(messages), tools=tools, asked=asked, now=now)

    def write(
        self, raw: Sequence[Raw], *, tools: bool = False, asked: bool = False, now: datetime = CLOCK
    ) -> str:
        """The same for messages in the template's own form."""
        template = self.codec.tokenizer.template(tools=tools)
        shown_tools = TOOLS if tools else None
        text = template.render(raw, shown_tools, now=now, generation_prompt=asked)
        if template.is_fast:
            if template not in self._exact:
                named = self.codec.tokenizer.named_tokens
                self._exact[template] = ChatTemplate(template.source, named, fast=False)
            exact = self._exact[template].render(raw, shown_tools, now=now, generation_prompt=asked)
            if exact != text:
                self.differences.append(sides(exact, text, names=("jinja2", "minijinja")))
                text = exact
        return text

    def refusal(self, raw: Sequence[Raw], *, tools: bool = False) -> str:
        """The template's own words where it refuses a conversation."""
        try:
            self.write(raw, tools=tools)
        except TemplateError as error:
            return words_of(error)
        return ""

    def grow(
        self, messages: Sequence[Message], then: Message, *, tools: bool = False, every: bool = False
    ) -> tuple[str, str]:
        """The text of a conversation as it stood when it went on, and with what came then.

        `every`: where a prompt on the way was not yet rewritten before that, it is the text to compare with.
        A reply comes behind the generation prompt. A template that opens every reply without being asked has
        that taken off, and empty thoughts do not count: history shows none, and the codec lets them stand.
        """
        replies = then.role == "assistant"
        earlier = self.show(messages, tools=tools, asked=replies)
        if not replies:
            earlier = earlier.removesuffix(self.opener) if self.opener else earlier
        later = _EMPTY_THOUGHT.sub("", self.show([*messages, then], tools=tools))
        earlier = _EMPTY_THOUGHT.sub("", earlier)
        places = [place for place, message in enumerate(messages) if message.role == "assistant"]
        for place in places if every and later.startswith(earlier) else ():
            prompt = _EMPTY_THOUGHT.sub("", self.show(messages[:place], tools=tools, asked=True))
            if not later.startswith(prompt):
                return prompt, later
        return earlier, later

    def stops_between(self, text: str, start: int, end: int) -> bool:
        """Whether a token that ends a message stands between two places."""
        found = self.codec.encoder.added_in(text, start, end)
        return any(token in self.codec.stop_ids for _, _, token in found)


def words_of(error: TemplateError) -> str:
    """What the template itself said."""
    words = str(error)
    for lead in _REFUSALS:
        words = words.partition(lead)[2] or words
    return words


def speak(codec: GenericCodec, message: Message, *, tools: bool = False, stop: bool = True) -> Ids | None:
    """The ids of a reply as the template shows it when it is the last thing said.

    None where the template does not show replies behind its own generation prompt, or refuses this one.
    """
    template = codec.tokenizer.template(tools=tools)
    dialect = codec.dialect(template)
    shown_tools = TOOLS if tools else None
    asked = [Message("user", ".")]
    try:
        prompt = template.render(dialect.write(asked), shown_tools, now=codec.now)
        whole = template.render(
            dialect.write([*asked, message]), shown_tools, now=codec.now, generation_prompt=False
        )
    except TemplateError:
        return None
    if not whole.startswith(prompt):
        return None
    said = whole[len(prompt) :]
    ends = [(start, token) for start, _, token in codec.encoder.added_in(said) if token in codec.stop_ids]
    terminator = ends[-1][1] if ends else min(codec.terminators, default=None)
    said = said[: ends[-1][0]] if ends else said
    if not message.reasoning:
        said = said.removeprefix(EMPTY_THINK)
    ids = codec.tokenizer.encode(said).tolist()
    return as_ids([*ids, terminator] if stop and terminator is not None else ids)


def sides(one: str, other: str, names: tuple[str, str] = ("before", "after")) -> Evidence:
    """Two texts from shortly before they part."""
    place = 0
    while place < min(len(one), len(other)) and one[place] == other[place]:
        place += 1
    return {names[0]: excerpt(one, place), names[1]: excerpt(other, place)}


def around(text: str, word: str) -> str:
    """The text around a word."""
    return excerpt(text, max(0, text.find(word)))


def excerpt(text: str, place: int) -> str:
    start, end = max(0, place - _BEFORE), place + _AFTER
    return "…" * (start > 0) + text[start:end] + "…" * (end < len(text))
