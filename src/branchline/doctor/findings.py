"""Findings about a chat template, and the probe with which the checks produce them.

A finding answers one question in a sentence, with texts that show it. `fine` needs no action; a `note` is
worth knowing (most notes cost forks, none costs exactness); `unsafe` means that something the model generated
would be lost, changed or not understood.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from branchline.chat.generic.chat_template import first_difference
from branchline.chat.generic.codec import TOOLS_NOT_SHOWN, GenericCodec
from branchline.chat.generic.template_probe import PROBE_TIME, TOOLS, USER
from branchline.chat.template_traits import TemplateMessage, TemplateTraits
from branchline.core.errors import TemplateError
from branchline.core.message import Message
from branchline.doctor.played_conversation import ConversationPlayer

Evidence = Mapping[str, str]
USE_VERBATIM = "serve with history=verbatim"
"""The remedy for changes to earlier messages: keep them as they were sampled."""
USE_RENDERERS = "use the renderers codec"
NAME_A_PARSER = "name a parser with serve --tool-parser"

_CHARS_BEFORE, _CHARS_AFTER = 40, 80
_ERROR_PREFIXES = (
    "the chat template refused the conversation: ",
    "the chat template failed on the conversation: ",
)


class Severity(StrEnum):
    FINE = "fine"
    NOTE = "note"
    UNSAFE = "unsafe"


@dataclass(frozen=True)
class Finding:
    """One question about a template, answered."""

    name: str
    severity: Severity
    sentence: str
    evidence: Evidence = field(default_factory=dict)
    behaviour: str = ""
    """What the template does, as the rest of a sentence "This template …", if the user should act on it."""
    remedy: str = ""
    forks_after: frozenset[str] = frozenset()
    """The roles of the messages after which prompts fork because of this."""
    with_tools: str = ""
    """What is lost if requests have tools, as the rest of a sentence "With tools …"; a template without tool
    support is safe for conversations without them."""

    @property
    def ok(self) -> bool:
        return self.severity == Severity.FINE


def fine(name: str, sentence: str) -> Finding:
    return Finding(name, Severity.FINE, sentence)


def note(
    name: str, sentence: str, evidence: Evidence, behaviour: str = "", forks_after: Iterable[str] = ()
) -> Finding:
    """Returns a note. A behaviour that costs forks has history=verbatim as its remedy."""
    remedy = USE_VERBATIM if behaviour else ""
    return Finding(name, Severity.NOTE, sentence, evidence, behaviour, remedy, frozenset(forks_after))


def unsafe(name: str, behaviour: str, evidence: Evidence, remedy: str) -> Finding:
    return Finding(name, Severity.UNSAFE, f"It {behaviour}.", evidence, behaviour, remedy)


class AuditProbe:
    """Renders and plays probe conversations with the templates of one codec."""

    def __init__(self, codec: GenericCodec) -> None:
        self.codec = codec.with_clock(PROBE_TIME)
        # The audit reports this itself.
        self.codec.logged_warnings = {TOOLS_NOT_SHOWN}
        self.player = ConversationPlayer(self.codec)

    @property
    def traits(self) -> TemplateTraits:
        """The traits of the template that is used with tools."""
        return self.codec.profile(tools=True).traits

    @property
    def generation_prompt(self) -> str:
        """The generation prompt, also of a template that always writes one."""
        return self.codec.profile().traits.generation_prompt

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: bool = False,
        add_generation_prompt: bool = False,
        now: datetime | None = None,
    ) -> str:
        """Returns the text of a conversation. Raises TemplateError if the template refuses it."""
        return self.codec.probe(tools=tools).render(
            messages, TOOLS if tools else (), add_generation_prompt=add_generation_prompt, now=now
        )

    def render_raw(self, messages: Sequence[TemplateMessage], *, tools: bool = False) -> str:
        """Returns the text of messages in the template's own form."""
        probe = self.codec.probe(tools=tools)
        return probe.render_raw(messages, TOOLS if tools else (), add_generation_prompt=False)

    def refusal_message(self, messages: Sequence[TemplateMessage], *, tools: bool = False) -> str:
        """Returns the template's own error message, or an empty text if it accepts the messages."""
        try:
            self.render_raw(messages, tools=tools)
        except TemplateError as error:
            return template_error_message(error)
        return ""

    def user_refusal(self, *, tools: bool) -> str:
        """Returns the template's error message about a single user message, or an empty text."""
        try:
            self.render([USER], tools=tools, add_generation_prompt=True)
        except TemplateError as error:
            return template_error_message(error)
        return ""

    def render_growth(
        self, messages: Sequence[Message], added: Message, *, tools: bool = False
    ) -> tuple[str, str]:
        """Returns the text of a conversation before and after a context message is added. A generation prompt
        that the template always writes is removed from the first."""
        before = self.render(messages, tools=tools)
        if self.generation_prompt:
            before = before.removesuffix(self.generation_prompt)
        return before, self.render([*messages, added], tools=tools)

    def has_stop_between(self, text: str, start: int, end: int) -> bool:
        """Whether a stop token stands between two offsets."""
        tokens = self.codec.segment_encoder.find_added_tokens(text, start, end)
        return any(token in self.codec.stop_ids for _, _, token in tokens)


def template_error_message(error: TemplateError) -> str:
    """Returns the template's own message without our prefix."""
    message = str(error)
    for prefix in _ERROR_PREFIXES:
        message = message.partition(prefix)[2] or message
    return message


def diff_excerpt(one: str, other: str, names: tuple[str, str] = ("before", "after")) -> Evidence:
    """Returns excerpts of two texts around their first difference."""
    start = first_difference(one, other)
    return {names[0]: excerpt(one, start), names[1]: excerpt(other, start)}


def excerpt_around(text: str, word: str) -> str:
    """Returns the text around a word."""
    return excerpt(text, max(0, text.find(word)))


def excerpt(text: str, offset: int) -> str:
    start, end = max(0, offset - _CHARS_BEFORE), offset + _CHARS_AFTER
    return "…" * (start > 0) + text[start:end] + "…" * (end < len(text))
