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
from branchline.chat.base import NewMessage
from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.generic.template_profile import EMPTY_THINK
from branchline.chat.generic.template_traits import TemplateTraits
from branchline.core.errors import TemplateError
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Ids, as_ids

TemplateMessage = dict[str, Any]

NOW = datetime(2001, 2, 3, 4, 5, 6)
OTHER_NOW = datetime(2019, 11, 28, 17, 46, 39)
REASONING_WORD, ARGUMENT_WORD = "zqthought", "zqargument"
TOOL_NAME, TOOL_DESCRIPTION = "zqlook", "zqpurpose"
TOOLS: tuple[TemplateMessage, ...] = (
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": TOOL_DESCRIPTION,
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    },
)
TOOL_CALL = ToolCall(TOOL_NAME, f'{{"at": "{ARGUMENT_WORD}"}}', "abcdefgh1")
OTHER_TOOL_CALL = ToolCall(TOOL_NAME, '{"at": "zqother"}', "abcdefgh2")

SYSTEM = Message("system", "zqsystem")
USER = Message("user", "zqask")
ASSISTANT = Message("assistant", "zqsaid")
ASSISTANT_WITH_REASONING = Message("assistant", "zqsaid", reasoning_content=REASONING_WORD)
ASSISTANT_WITH_CALL = Message("assistant", tool_calls=(TOOL_CALL,))
ASSISTANT_WITH_TWO_CALLS = Message("assistant", tool_calls=(TOOL_CALL, OTHER_TOOL_CALL))
TOOL_RESULT = Message("tool", "zqresult", tool_call_id=TOOL_CALL.id, name=TOOL_NAME)
OTHER_TOOL_RESULT = Message("tool", "zqmoreresult", tool_call_id=OTHER_TOOL_CALL.id, name=TOOL_NAME)
NEXT_USER = Message("user", "zqmore")

_EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")
_CHARS_BEFORE, _CHARS_AFTER = 40, 80
_ERROR_PREFIXES = (
    "the chat template refused the conversation: ",
    "the chat template failed on the conversation: ",
)


class TemplateProbe:
    """One codec's templates, tried."""

    def __init__(self, codec: GenericCodec) -> None:
        self.codec = codec
        self.minijinja_differences: list[Evidence] = []
        """Where minijinja and jinja2 wrote different texts."""
        self._jinja_templates: dict[ChatTemplate, ChatTemplate] = {}

    @property
    def traits(self) -> TemplateTraits:
        """How the template that is used with tools wants to be spoken to."""
        return self.codec.template_traits(self.codec.tokenizer.chat_template(tools=True))

    @cached_property
    def generation_prompt(self) -> str:
        """The generation prompt, also of a template that writes it without being asked."""
        return self.codec.decode(self.codec.extend((), [NewMessage(USER)]).generation_prompt_ids)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: bool = False,
        add_generation_prompt: bool = False,
        now: datetime = NOW,
    ) -> str:
        """A conversation as text; `asked`: a generation prompt is asked for."""
        dialect = self.codec.template_traits(self.codec.tokenizer.chat_template(tools=tools))
        return self.render_template_messages(
            dialect.to_template_messages(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            now=now,
        )

    def render_template_messages(
        self,
        raw: Sequence[TemplateMessage],
        *,
        tools: bool = False,
        add_generation_prompt: bool = False,
        now: datetime = NOW,
    ) -> str:
        """The same for messages in the template's own form."""
        template = self.codec.tokenizer.chat_template(tools=tools)
        shown_tools = TOOLS if tools else None
        text = template.render(raw, shown_tools, now=now, add_generation_prompt=add_generation_prompt)
        if template.uses_minijinja:
            if template not in self._jinja_templates:
                named = self.codec.tokenizer.special_tokens
                self._jinja_templates[template] = ChatTemplate(template.source, named, use_minijinja=False)
            exact = self._jinja_templates[template].render(
                raw, shown_tools, now=now, add_generation_prompt=add_generation_prompt
            )
            if exact != text:
                self.minijinja_differences.append(diff_excerpt(exact, text, names=("jinja2", "minijinja")))
                text = exact
        return text

    def refusal_message(self, raw: Sequence[TemplateMessage], *, tools: bool = False) -> str:
        """The template's own words where it refuses a conversation."""
        try:
            self.render_template_messages(raw, tools=tools)
        except TemplateError as error:
            return template_error_message(error)
        return ""

    def render_growth(
        self,
        messages: Sequence[Message],
        then: Message,
        *,
        tools: bool = False,
        check_every_prompt: bool = False,
    ) -> tuple[str, str]:
        """The text of a conversation as it stood when it went on, and with what came then.

        `every`: where a prompt on the way was not yet rewritten before that, it is the text to compare with.
        A reply comes behind the generation prompt. A template that opens every reply without being asked has
        that taken off, and empty thoughts do not count: history shows none, and the codec lets them stand.
        """
        replies = then.role == "assistant"
        earlier = self.render(messages, tools=tools, add_generation_prompt=replies)
        if not replies:
            earlier = earlier.removesuffix(self.generation_prompt) if self.generation_prompt else earlier
        later = _EMPTY_REASONING.sub("", self.render([*messages, then], tools=tools))
        earlier = _EMPTY_REASONING.sub("", earlier)
        places = [place for place, message in enumerate(messages) if message.role == "assistant"]
        for place in places if check_every_prompt and later.startswith(earlier) else ():
            prompt = _EMPTY_REASONING.sub(
                "", self.render(messages[:place], tools=tools, add_generation_prompt=True)
            )
            if not later.startswith(prompt):
                return prompt, later
        return earlier, later

    def has_stop_between(self, text: str, start: int, end: int) -> bool:
        """Whether a token that ends a message stands between two places."""
        found = self.codec.segment_encoder.find_added_tokens(text, start, end)
        return any(token in self.codec.stop_ids for _, _, token in found)


def template_error_message(error: TemplateError) -> str:
    """What the template itself said."""
    words = str(error)
    for lead in _ERROR_PREFIXES:
        words = words.partition(lead)[2] or words
    return words


def render_reply(
    codec: GenericCodec, message: Message, *, tools: bool = False, stop: bool = True
) -> Ids | None:
    """The ids of a reply as the template shows it when it is the last thing said.

    None where the template does not show replies behind its own generation prompt, or refuses this one.
    """
    template = codec.tokenizer.chat_template(tools=tools)
    dialect = codec.template_traits(template)
    shown_tools = TOOLS if tools else None
    asked = [Message("user", ".")]
    try:
        prompt = template.render(dialect.to_template_messages(asked), shown_tools, now=codec.now)
        whole = template.render(
            dialect.to_template_messages([*asked, message]),
            shown_tools,
            now=codec.now,
            add_generation_prompt=False,
        )
    except TemplateError:
        return None
    if not whole.startswith(prompt):
        return None
    said = whole[len(prompt) :]
    ends = [
        (start, token)
        for start, _, token in codec.segment_encoder.find_added_tokens(said)
        if token in codec.stop_ids
    ]
    terminator = ends[-1][1] if ends else min(codec.terminator_ids, default=None)
    said = said[: ends[-1][0]] if ends else said
    if not message.reasoning_content:
        said = said.removeprefix(EMPTY_THINK)
    ids = codec.tokenizer.encode(said).tolist()
    return as_ids([*ids, terminator] if stop and terminator is not None else ids)


def diff_excerpt(one: str, other: str, names: tuple[str, str] = ("before", "after")) -> Evidence:
    """Two texts from shortly before they part."""
    place = 0
    while place < min(len(one), len(other)) and one[place] == other[place]:
        place += 1
    return {names[0]: excerpt(one, place), names[1]: excerpt(other, place)}


def excerpt_around(text: str, word: str) -> str:
    """The text around a word."""
    return excerpt(text, max(0, text.find(word)))


def excerpt(text: str, place: int) -> str:
    start, end = max(0, place - _CHARS_BEFORE), place + _CHARS_AFTER
    return "…" * (start > 0) + text[start:end] + "…" * (end < len(text))
