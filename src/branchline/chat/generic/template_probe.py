"""Finds out what a chat template does by rendering probe conversations.

The text of every probe message is a word that no template writes by itself: whether and where the word
occurs in the rendered text shows what the template did with the message. Every probe is rendered by both
template engines, so that probing also verifies minijinja against jinja2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import product
from typing import Any

from branchline.chat.base import ChatTemplateKwargs
from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.parsing.output_parser import NO_REASONING, REASONING_MARKERS
from branchline.chat.template_traits import (
    MALFORMED_CALL,
    UNRESTRICTED_ROLES,
    RoleRules,
    TemplateMessage,
    TemplateTraits,
    detect_malformed_arguments_format,
)
from branchline.chat.token_escapes import Escape
from branchline.core.errors import TemplateError
from branchline.core.message import Message, ToolCall
from branchline.core.reader import REASONING_TEXT_FIELDS

PROBE_TIME = datetime(2001, 2, 3, 4, 5, 6)
EMPTY_THINK = "<think>\n\n</think>\n\n"
REASONING_WORD, ARGUMENT_WORD, OTHER_ARGUMENT_WORD = "zqthought", "zqargument", "zqother"
TOOL_NAME, TOOL_DESCRIPTION = "zqlook", "zqpurpose"
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": TOOL_DESCRIPTION,
            # Some templates fail on properties without a description.
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string", "description": "zqplace"}},
                "required": ["at"],
            },
        },
    },
)
TOOL_CALL = ToolCall(TOOL_NAME, f'{{"at": "{ARGUMENT_WORD}"}}', "abcdefgh1")
OTHER_TOOL_CALL = ToolCall(TOOL_NAME, f'{{"at": "{OTHER_ARGUMENT_WORD}"}}', "abcdefgh2")

SYSTEM = Message("system", "zqsystem")
LATE_SYSTEM = Message("system", "zqlater")
USER = Message("user", "zqask")
NEXT_USER = Message("user", "zqmore")
ASSISTANT = Message("assistant", "zqsaid")
ASSISTANT_WITH_REASONING = Message("assistant", "zqsaid", reasoning_content=REASONING_WORD)
ASSISTANT_WITH_CALL = Message("assistant", tool_calls=(TOOL_CALL,))
ASSISTANT_WITH_OTHER_CALL = Message("assistant", tool_calls=(OTHER_TOOL_CALL,))
ASSISTANT_WITH_TWO_CALLS = Message("assistant", tool_calls=(TOOL_CALL, OTHER_TOOL_CALL))
ASSISTANT_WITH_TEXT_AND_CALL = Message("assistant", "zqsaid", tool_calls=(TOOL_CALL,))
ASSISTANT_WITH_REASONING_AND_CALL = Message(
    "assistant", reasoning_content=REASONING_WORD, tool_calls=(TOOL_CALL,)
)
TOOL_RESULT = Message("tool", "zqresult", tool_call_id=TOOL_CALL.id, name=TOOL_NAME)
OTHER_TOOL_RESULT = Message("tool", "zqmoreresult", tool_call_id=OTHER_TOOL_CALL.id, name=TOOL_NAME)

UNUSUAL_TEXT = " \n Hé <b>&\"'\\ {{ x }} {% y %}\t中文 🙂 e\u0301 \u00a0\u2028\r\n</think> \n"
_UNUSUAL_ARGUMENTS = {
    "é": UNUSUAL_TEXT,
    "integer": -7,
    "large": 2**70,
    "floats": [0.1, -2.5, 0.0001, 123456789.123456789],
    "float": 0.5,
    "yes": True,
    "no": False,
    "null": None,
    "empty": {},
    "nested": {"list": [1, [None, True, "x"], {"k": "<&>"}], "text": "a\nb"},
}
_UNUSUAL_TOOLS: tuple[dict[str, Any], ...] = (
    *TOOLS,
    {
        "type": "function",
        "function": {
            "name": "zqfind",
            "description": f'Finds "things" & more.{UNUSUAL_TEXT}',
            "parameters": {
                "type": "object",
                "properties": {
                    "at": {"type": ["integer", "null"], "minimum": 0.5, "default": None},
                    "kind": {"enum": ["a", 1, True], "description": "é"},
                    "deep": {"type": "array", "items": {"type": "object", "properties": {}}},
                },
                "required": ["at"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    },
)


def _unusual(role: Any, **fields: Any) -> Message:
    return Message(role, UNUSUAL_TEXT, **fields)


def _verification_conversations() -> list[tuple[list[Message], Sequence[dict[str, Any]]]]:
    """Returns conversations and tools for the comparison of both engines."""
    call = ToolCall("zqfind", json.dumps(_UNUSUAL_ARGUMENTS, ensure_ascii=False), "abcdefgh3")
    empty_call = ToolCall(TOOL_NAME, "{}", "abcdefgh4")
    result = _unusual("tool", tool_call_id="abcdefgh3", name="zqfind")
    reply = _unusual("assistant", reasoning_content=UNUSUAL_TEXT)
    user, system = _unusual("user"), _unusual("system")
    conversations = [
        [user],
        [system, user],
        [system, user, reply],
        [system, user, reply, user],
        [system, user, reply, user, reply, user],
        [user, user],
        [user, reply, _unusual("system"), user],
        [_unusual("developer"), user],
        [user, Message("assistant"), user],
        [Message("user"), Message("assistant", "a"), Message("user", "b")],
        [user, _unusual("assistant", tool_calls=(call,)), result],
        [user, Message("assistant", tool_calls=(call,)), result, reply, user],
        [system, user, Message("assistant", tool_calls=(empty_call,)), result, user],
        [user, Message("assistant", tool_calls=(call, empty_call)), result, result, reply],
        [user, Message("assistant", reasoning_content="r", tool_calls=(call,)), result, result],
        [user, reply, user, Message("assistant", reasoning_content="r", tool_calls=(call,)), result],
        [user, MALFORMED_CALL, TOOL_RESULT, user],
    ]
    return [(messages, tools) for messages in conversations for tools in ((), _UNUSUAL_TOOLS)]


@dataclass(frozen=True)
class TemplateProbe:
    """Renders probe conversations with one template under one set of template arguments."""

    template: ChatTemplate
    traits: TemplateTraits = field(default_factory=TemplateTraits)
    chat_template_kwargs: ChatTemplateKwargs = field(default_factory=dict)
    now: datetime = PROBE_TIME

    def with_traits(self, **changes: Any) -> TemplateProbe:
        return replace(self, traits=replace(self.traits, **changes))

    def render_raw(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """Returns the text of messages in the template's own form. Raises TemplateError if it refuses."""
        return self.template.render(
            messages,
            tools,
            self.chat_template_kwargs,
            now=now or self.now,
            add_generation_prompt=add_generation_prompt,
            verify=True,
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        escapes: Mapping[int, Escape] | None = None,
    ) -> str:
        """Returns the text of a conversation. Raises TemplateError if the template refuses it."""
        raw = self.traits.to_template_messages(messages, escapes=escapes)
        return self.render_raw(raw, tools, add_generation_prompt=add_generation_prompt, now=now)

    def render_or_empty(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        escapes: Mapping[int, Escape] | None = None,
    ) -> str:
        """Returns the text of a conversation, or an empty text if the template refuses it."""
        try:
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt, escapes=escapes)
        except TemplateError:
            return ""

    def render_reply(
        self, message: Message, tools: Sequence[dict[str, Any]] = (), escape: Escape | None = None
    ) -> str | None:
        """Returns the text that follows the generation prompt if the message is the last one, terminator
        included; None if the template refuses the message or changes the prompt."""
        user = Message("user", ".")
        escapes = {1: escape} if escape is not None else None
        prompt = self.render_or_empty([user], tools)
        text = self.render_or_empty([user, message], tools, add_generation_prompt=False, escapes=escapes)
        if not prompt or not text.startswith(prompt):
            return None
        reply = text[len(prompt) :]
        return reply if message.reasoning_content else reply.removeprefix(EMPTY_THINK)

    def render_call(self) -> str:
        """Returns a reply with one call, from the start of its text or its marker to the end of the
        conversation; empty if the template shows no calls."""
        for messages in ([USER, ASSISTANT_WITH_CALL], [USER, ASSISTANT_WITH_CALL, TOOL_RESULT]):
            text = self.render_or_empty(messages, TOOLS, add_generation_prompt=False)
            text = text[text.rfind(USER.content) + len(USER.content) :]
            if ARGUMENT_WORD not in text:
                continue
            text = text.partition(TOOL_RESULT.content)[0]
            for prefix in (self.traits.generation_prompt, self.traits.history_reply_prefix):
                before, found, reply = text.partition(prefix.strip()) if prefix.strip() else (text, "", "")
                if found and ARGUMENT_WORD not in before:
                    return reply.lstrip()
            return text
        return ""

    def strips_reasoning(self, reasoning_format: str) -> bool:
        """Whether the template removes reasoning that stands in the text of an earlier reply."""
        if reasoning_format == NO_REASONING:
            return False
        opener, closer = REASONING_MARKERS[reasoning_format]
        reply = Message("assistant", f"{opener}\n{REASONING_WORD}\n{closer}\n\n{ASSISTANT.content}")
        text = self.render_or_empty([USER, reply, NEXT_USER])
        return ASSISTANT.content in text and REASONING_WORD not in text

    def verify_engines(self) -> None:
        """Renders all verification conversations with both engines; a difference disables minijinja."""
        for messages, tools in _verification_conversations():
            if not self.template.uses_minijinja:
                return
            self.render_or_empty(messages, tools)

    def render_examples(self) -> list[str]:
        """Returns the texts of some conversations with unusual characters, as far as the template accepts
        them."""
        conversations = _verification_conversations()
        return list(filter(None, (self.render_or_empty(*example) for example in conversations[:14:3])))

    def has_local_tail(self) -> bool:
        """Whether the text after a reply is the same in a short conversation without tools and in a long one
        with tools."""
        tails = []
        for before, tools in (([USER], ()), ([USER, Message("assistant", "a"), USER], TOOLS)):
            text = self.render_or_empty([*before, ASSISTANT, NEXT_USER], tools)
            tails.append(text[text.find(ASSISTANT.content) :])
        return tails[0] == tails[1]


# -- traits ---------------------------------------------------------------------------------------------


def probe_template_traits(
    template: ChatTemplate,
    chat_template_kwargs: ChatTemplateKwargs | None = None,
    now: datetime | None = None,
) -> TemplateTraits:
    """Returns what a template accepts and shows, and verifies minijinja with it."""
    probe = TemplateProbe(template, chat_template_kwargs=chat_template_kwargs or {}, now=now or PROBE_TIME)
    probe = probe.with_traits(requires_content_parts=_probe_content_parts(probe))
    generation_prompt, history_reply_prefix = _probe_reply_prefixes(probe)
    probe = probe.with_traits(generation_prompt=generation_prompt, history_reply_prefix=history_reply_prefix)
    probe = _probe_tool_calls(probe)
    aliases = {
        role: alias
        for role, alias in (("developer", "system"), ("function", "tool"))
        if "zqrole" not in probe.render_or_empty([Message(role, "zqrole"), USER])  # type: ignore[arg-type]
    }
    shows_tools = TOOL_NAME in probe.render_or_empty([USER], TOOLS)
    probe = probe.with_traits(role_aliases=aliases, shows_tools=shows_tools)
    probe = probe.with_traits(role_rules=_probe_role_rules(probe))
    probe = _probe_reasoning(probe)
    probe.verify_engines()
    return probe.traits


def _probe_content_parts(probe: TemplateProbe) -> bool:
    """Whether the template shows more messages if their text is a list of parts, and not the list itself."""
    messages = [USER, ASSISTANT, NEXT_USER]
    as_text, as_parts = (
        probe.with_traits(requires_content_parts=requires_parts).render_or_empty(messages)
        for requires_parts in (False, True)
    )
    shows_list = any(key in as_parts and key not in as_text for key in ("'type'", '"type"'))
    shown = [sum(message.content in text for message in messages) for text in (as_text, as_parts)]
    return shown[1] > shown[0] and not shows_list


def _probe_reply_prefixes(probe: TemplateProbe) -> tuple[str, str]:
    """Returns the generation prompt, and the text before an earlier reply."""
    # A template for prompts with tools may refuse a prompt without.
    tools = () if probe.render_or_empty([USER]) else TOOLS
    body = probe.render_or_empty([USER], tools, add_generation_prompt=False)
    prompt = probe.render_or_empty([USER], tools)
    generation_prompt = prompt[len(body) :] if prompt.startswith(body) else ""
    text = probe.render_or_empty([USER, ASSISTANT, NEXT_USER], tools)
    reply = text.find(ASSISTANT.content)
    if generation_prompt and reply >= 0 and text.startswith(body):
        return generation_prompt, text[len(body) : reply]
    return generation_prompt, generation_prompt


def _probe_tool_calls(probe: TemplateProbe) -> TemplateProbe:
    """Finds the form in which the template shows a call as the model writes it, if there is one."""
    for arguments_format, null_content in product(("object", "text"), (False, True)):
        candidate = probe.with_traits(arguments_format=arguments_format, requires_null_content=null_content)
        text = candidate.render_or_empty([USER, ASSISTANT_WITH_CALL, TOOL_RESULT], TOOLS)
        is_quoted_twice, is_python_dict = '\\"at' in text, "{'at'" in text
        if (
            ARGUMENT_WORD in text
            and TOOL_RESULT.content in text
            and not is_quoted_twice
            and not is_python_dict
        ):
            break
    else:
        return probe.with_traits(shows_tool_calls=False)
    renamed = ToolCall(TOOL_NAME, TOOL_CALL.arguments, "call_1")
    result = Message("tool", TOOL_RESULT.content, tool_call_id="call_1", name=TOOL_NAME)
    if not candidate.render_or_empty([USER, Message("assistant", tool_calls=(renamed,)), result], TOOLS):
        candidate = candidate.with_traits(call_id_length=9)
    malformed = candidate.render_or_empty([USER, MALFORMED_CALL, TOOL_RESULT], TOOLS)
    return candidate.with_traits(malformed_arguments_format=detect_malformed_arguments_format(malformed))


def _probe_role_rules(probe: TemplateProbe) -> RoleRules:
    """Returns the rules that make the template show every message; a rule that does not help is left out."""
    tools = TOOLS if probe.traits.shows_tool_calls else ()
    extra = Message("user", "zqextra")
    late_user = Message("user", "zqlast")
    cases: list[tuple[list[Message], str, bool]] = [
        ([USER, ASSISTANT, NEXT_USER, extra], "must_alternate", True),
        ([SYSTEM, LATE_SYSTEM, USER], "allows_consecutive_system", False),
        ([USER, ASSISTANT, LATE_SYSTEM, NEXT_USER], "allows_late_system", False),
    ]
    if probe.traits.shows_tool_calls:
        messages = [USER, ASSISTANT_WITH_CALL, TOOL_RESULT, late_user]
        cases.append((messages, "allows_user_after_tool", False))
    rules = UNRESTRICTED_ROLES

    def shows_all(rules: RoleRules, messages: Sequence[Message]) -> bool:
        text = probe.with_traits(role_rules=rules).render_or_empty(messages, tools)
        return all(message.content in text for message in messages)

    for messages, rule, value in cases:
        candidate = replace(rules, **{rule: value})
        if not shows_all(rules, messages) and shows_all(candidate, messages):
            rules = candidate
    return rules


def _probe_reasoning(probe: TemplateProbe) -> TemplateProbe:
    """Finds the field from which the template shows reasoning.

    Some show it inside a tool cycle, some next to a call, some only on the last message.
    """
    conversations = (
        [USER, ASSISTANT_WITH_REASONING, Message("tool", "zqresult")],
        [USER, ASSISTANT_WITH_REASONING],
        [USER, ASSISTANT_WITH_REASONING_AND_CALL, TOOL_RESULT],
    )
    for name in REASONING_TEXT_FIELDS:
        candidate = probe.with_traits(reasoning_field=name)
        if any(REASONING_WORD in candidate.render_or_empty(messages) for messages in conversations):
            joins = _shows_text_as_reasoning(candidate)
            return candidate.with_traits(shows_reasoning=True, joins_text_to_reasoning=joins)
    candidate = probe.with_traits(reasoning_is_part=True)
    if any(_is_shown_as_text(candidate.render_or_empty(messages)) for messages in conversations):
        return candidate.with_traits(shows_reasoning=True)
    return probe


def _is_shown_as_text(text: str) -> bool:
    """Whether a text shows reasoning, and not the part of a message that contains it."""
    return REASONING_WORD in text and "'thinking'" not in text and '"thinking"' not in text


def _shows_text_as_reasoning(probe: TemplateProbe) -> bool:
    """Whether the template shows text next to a call exactly as it shows reasoning there."""
    reply = ASSISTANT_WITH_REASONING_AND_CALL
    as_text = Message("assistant", REASONING_WORD, tool_calls=reply.tool_calls)
    one, other = (probe.render_or_empty([USER, message, TOOL_RESULT], TOOLS) for message in (reply, as_text))
    return one == other and REASONING_WORD in one
