"""How one chat template wants to be spoken to, found out by trying.

Templates differ in what they accept (arguments as object or text, null content, ids of nine letters) and
in what they do (show reasoning, strip it later, fold tool results). Each is probed once when the template is
loaded; a probe that the template refuses simply tells us so. Arguments that are no JSON object are shown to
every template in a way that it takes: a model's slip must not end its episode.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import product
from typing import Any, Literal

import msgspec

from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.generic.role_rules import UNRESTRICTED_ROLES, RoleRules
from branchline.core.errors import TemplateError
from branchline.core.message import Media, Message, ToolCall
from branchline.core.reader import REASONING_TEXT_FIELDS

ChatTemplateKwargs = Mapping[str, Any]
FieldMarker = Callable[[int, str], str]

_ID_ALPHABET = string.digits + string.ascii_letters
_USER_WORD, _REPLY_WORD, _REASONING_WORD, _ARGUMENT_WORD, _RESULT_WORD = (
    "zqask",
    "zqsaid",
    "zqthought",
    "zqarg",
    "zqresult",
)
_MALFORMED_ARGUMENTS = 'zq"odd'
MALFORMED_CALL = Message("assistant", "", tool_calls=(ToolCall("look", _MALFORMED_ARGUMENTS, "abcdefghi"),))
"""A call whose arguments are no JSON: what comes of it when it is shown says how it may be."""
_PLACEHOLDER_KEY = "arguments"
"""The key of the object that stands in for arguments that are none."""
_TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
]


MalformedArgumentsFormat = Literal["text", "value", "object"]
"""How arguments that are no JSON object are shown: as they were written, as the value they are if they are
JSON and as a string if not, or in an object that stands in for them."""


@dataclass(frozen=True)
class TemplateTraits:
    """What a template accepts and shows."""

    arguments_format: Literal["object", "text"] = "object"
    malformed_arguments_format: MalformedArgumentsFormat = "text"
    requires_null_content: bool = False
    """Content must be null beside tool calls."""
    call_id_length: int = 0
    """Ids of tool calls must have this many letters; 0: as they are."""
    shows_tool_calls: bool = True
    shows_reasoning: bool = False
    shows_tools: bool = True
    reasoning_field: str = "reasoning_content"
    """Where the template looks for reasoning."""
    role_aliases: Mapping[str, str] = field(default_factory=dict)
    """What a role it does not know is shown as: a developer's words as the system's."""
    role_rules: RoleRules = UNRESTRICTED_ROLES
    generation_prompt: str = ""
    history_reply_prefix: str = ""
    """What stands before an earlier reply's text; not always the generation prompt."""

    def to_template_messages(
        self, messages: Sequence[Message], bracket: Mapping[int, FieldMarker] | None = None
    ) -> list[dict[str, Any]]:
        """Messages as this template wants them; fields of messages in `bracket` are marked."""
        written: list[dict[str, Any]] = []
        results: list[str] = []
        for index, message in enumerate(messages):
            mark = bracket.get(index) if bracket else None
            raw = self._message_to_dict(index, message, mark)
            if message.tool_calls:
                results = [call["id"] for call in raw["tool_calls"]]
                wire = [call.id for call in message.tool_calls]
            elif message.role == "tool" and results:
                # Templates pair results with calls by position, and some print the id.
                place = wire.index(message.tool_call_id) if message.tool_call_id in wire else 0
                raw["tool_call_id"] = results.pop(min(place, len(results) - 1))
                wire.pop(min(place, len(wire) - 1))
            elif message.role == "tool":
                raw["tool_call_id"] = self._call_id(message.tool_call_id, index, 0)
            written.append(raw)
        return written if self.role_rules is UNRESTRICTED_ROLES else self.role_rules.apply(written)

    def _message_to_dict(self, index: int, message: Message, mark: FieldMarker | None) -> dict[str, Any]:
        raw: dict[str, Any] = {"role": self.role_aliases.get(message.role, message.role)}
        raw["content"] = _content_value(message, mark)
        if message.reasoning_content:
            raw[self.reasoning_field] = (
                mark(1, message.reasoning_content) if mark else message.reasoning_content
            )
        if message.name:
            raw["name"] = message.name
        if message.tool_calls:
            if self.requires_null_content and not message.content:
                raw["content"] = None
            raw["tool_calls"] = [
                {
                    "id": self._call_id(call.id, index, place),
                    "type": "function",
                    "function": self._function_to_dict(call, place, mark),
                }
                for place, call in enumerate(message.tool_calls)
            ]
        return raw

    def _function_to_dict(self, call: ToolCall, place: int, mark: FieldMarker | None) -> dict[str, Any]:
        value = self._format_arguments(call.arguments)
        if mark is None:
            return {"name": call.name, "arguments": value}
        opened, closed = mark(2 + place, "\0").split("\0")
        if isinstance(value, str):
            return {"name": call.name, "arguments": f"{opened}{value}{closed}"}
        if not isinstance(value, dict) or not value:
            return {"name": f"{opened}{call.name}{closed}", "arguments": value}
        # On its own first and last key: a key more would be shown as one.
        last = len(value) - 1
        keys = [(opened * (n == 0)) + key + (closed * (n == last)) for n, key in enumerate(value)]
        return {"name": call.name, "arguments": dict(zip(keys, value.values(), strict=True))}

    def _format_arguments(self, text: str) -> Any:
        """Arguments in the shape in which the template takes them."""
        if self.arguments_format == "text":
            return text
        value: Any = text
        with suppress(msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            value = msgspec.json.decode(text.strip() or "{}")
        if isinstance(value, dict) or self.malformed_arguments_format == "value":
            return value
        return text if self.malformed_arguments_format == "text" else {_PLACEHOLDER_KEY: text}

    def _call_id(self, wanted: str, index: int, place: int) -> str:
        if not self.call_id_length or (len(wanted) == self.call_id_length and wanted.isalnum()):
            return wanted or f"call_{index}_{place}"
        number, letters = index * 64 + place + 1, ""
        while number:
            number, digit = divmod(number, len(_ID_ALPHABET))
            letters = _ID_ALPHABET[digit] + letters
        return letters.rjust(self.call_id_length, "0")


def _content_value(message: Message, mark: FieldMarker | None) -> Any:
    if message.media:
        return [
            {"type": "text", "text": part} if isinstance(part, str) else _media_part(part)
            for part in message.parts
        ]
    if mark is None:
        return message.content
    # A field that is empty is not marked, unless nothing else could show where the message stands.
    return (
        mark(0, message.content)
        if message.content or not (message.reasoning_content or message.tool_calls)
        else ""
    )


def _media_part(media: Media) -> dict[str, Any]:
    return {"type": media.kind, media.kind: media.url or media.digest}


def has_malformed_arguments(message: Message) -> bool:
    """Whether a message has a call whose arguments are no JSON object.

    What a template makes of them is its own affair, so nobody can hold it against what was sampled.
    """
    return any(
        not (call.is_json and call.canonical_arguments.startswith(b"{")) for call in message.tool_calls
    )


def detect_malformed_arguments_format(shown: str) -> MalformedArgumentsFormat:
    """How a conversation with the odd call should show it, given what became of its arguments as a text."""
    if _MALFORMED_ARGUMENTS in shown:
        return "text"
    return "value" if json.dumps(_MALFORMED_ARGUMENTS) in shown else "object"


def probe_template_traits(
    template: ChatTemplate,
    chat_template_kwargs: ChatTemplateKwargs | None = None,
    now: datetime | None = None,
) -> TemplateTraits:
    """Finds out how a template wants to be spoken to."""
    tried = _TraitProbe(template, chat_template_kwargs, now or datetime.now())
    opening, before = tried.reply_prefixes()
    found = TemplateTraits(generation_prompt=opening, history_reply_prefix=before)
    call = Message(
        "assistant", "", tool_calls=(ToolCall("look", f'{{"at": "{_ARGUMENT_WORD}"}}', "abcdefghi"),)
    )
    result = Message("tool", _RESULT_WORD, tool_call_id="abcdefghi", name="look")
    shown = ""
    for arguments, null_content in product(("object", "text"), (False, True)):
        candidate = replace(found, arguments_format=arguments, requires_null_content=null_content)  # type: ignore[arg-type]
        text = tried.render(candidate, [Message("user", _USER_WORD), call, result], _TOOLS)
        # Neither a text that was quoted again nor Python's idea of an object is how the model writes it.
        if _ARGUMENT_WORD in text and _RESULT_WORD in text and '\\"at' not in text and "{'at'" not in text:
            found, shown = candidate, text
            break
    found = replace(found, shows_tool_calls=bool(shown))
    if shown:
        other = Message(
            "assistant", "", tool_calls=(ToolCall("look", f'{{"at": "{_ARGUMENT_WORD}"}}', "call_1"),)
        )
        renamed = [
            Message("user", _USER_WORD),
            other,
            Message("tool", _RESULT_WORD, tool_call_id="call_1", name="look"),
        ]
        if not tried.render(found, renamed, _TOOLS):
            found = replace(found, call_id_length=9)
        odd = tried.render(found, [Message("user", _USER_WORD), MALFORMED_CALL, result], _TOOLS)
        found = replace(found, malformed_arguments_format=detect_malformed_arguments_format(odd))
    roles = {
        role: stand_in
        for role, stand_in in (("developer", "system"), ("function", "tool"))
        if _REPLY_WORD not in tried.render(found, [Message(role, _REPLY_WORD), Message("user", _USER_WORD)])  # type: ignore[arg-type]
    }
    found = replace(
        found,
        role_aliases=roles,
        shows_tools="look" in tried.render(found, [Message("user", _USER_WORD)], _TOOLS),
    )
    found = replace(found, role_rules=tried.role_rules(found, [call, result] if shown else []))
    for name in REASONING_TEXT_FIELDS:
        candidate = replace(found, reasoning_field=name)
        if tried.shows_reasoning(candidate, call, result):
            return replace(candidate, shows_reasoning=True)
    return found


@dataclass(frozen=True)
class _TraitProbe:
    """Renders that a template may refuse; a refusal is an empty text."""

    template: ChatTemplate
    chat_template_kwargs: ChatTemplateKwargs | None
    now: datetime

    def render(
        self,
        dialect: TemplateTraits,
        messages: Sequence[Message],
        tools: Sequence[ChatTemplateKwargs] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        try:
            return self.template.render(
                dialect.to_template_messages(messages),
                tools,
                self.chat_template_kwargs,
                now=self.now,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError:
            return ""

    def reply_prefixes(self) -> tuple[str, str]:
        """What the template opens a reply with, and what stands before an earlier one."""
        plain, ask = TemplateTraits(), Message("user", _USER_WORD)
        body = self.render(plain, [ask], add_generation_prompt=False)
        whole = self.render(plain, [ask])
        opening = whole[len(body) :] if whole.startswith(body) else ""
        talk = self.render(plain, [ask, Message("assistant", _REPLY_WORD), Message("user", _RESULT_WORD)])
        place = talk.find(_REPLY_WORD)
        return opening, talk[len(body) : place] if place >= 0 and talk.startswith(
            body
        ) and opening else opening

    def role_rules(self, dialect: TemplateTraits, call_and_result: Sequence[Message]) -> RoleRules:
        """What the template takes of who speaks when. Where nothing helps it is left as it is."""
        ask, said = Message("user", _USER_WORD), Message("assistant", _REPLY_WORD)
        again, late = Message("user", _REASONING_WORD), Message("system", _ARGUMENT_WORD)
        found = UNRESTRICTED_ROLES

        def takes(turns: RoleRules, *messages: Message) -> bool:
            text = self.render(
                replace(dialect, role_rules=turns), messages, _TOOLS if call_and_result else None
            )
            return all(message.content in text for message in messages)

        def learn(messages: Sequence[Message], **change: bool) -> None:
            nonlocal found
            if not takes(found, *messages) and takes(replace(found, **change), *messages):
                found = replace(found, **change)

        learn([ask, said, again, Message("user", _RESULT_WORD)], must_alternate=True)
        learn([late, Message("system", _RESULT_WORD), ask], allows_consecutive_system=False)
        learn([ask, said, late, again], allows_late_system=False)
        if call_and_result:
            learn([ask, *call_and_result, again], allows_user_after_tool=False)
        return found

    def shows_reasoning(self, dialect: TemplateTraits, call: Message, result: Message) -> bool:
        """Some show reasoning inside a tool cycle, some beside a call, some only on the last message."""
        ask, said = (
            Message("user", _USER_WORD),
            Message("assistant", _REPLY_WORD, reasoning_content=_REASONING_WORD),
        )
        beside = Message("assistant", "", reasoning_content=_REASONING_WORD, tool_calls=call.tool_calls)
        talks = ([ask, said, Message("tool", _RESULT_WORD)], [ask, said], [ask, beside, result])
        return any(_REASONING_WORD in self.render(dialect, talk) for talk in talks)
