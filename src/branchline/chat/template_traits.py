"""Writes messages in the form that one chat template accepts.

Templates differ in what they accept (arguments as object or text, null content, call ids of nine characters)
and in which order of roles they allow. `TemplateTraits` describes one template. Agents follow none of these
rules, so whatever a template would refuse is written in the nearest form that it accepts:

- arguments that are not a JSON object are shown as text or inside an object (`MalformedArgumentsFormat`);
- text next to both reasoning and calls is added to the reasoning, if the template shows it there;
- a late system message becomes a user message, consecutive user or system messages become one, and a user
  message after a tool result becomes part of the result (`RoleRules`).

What a template accepts is left unchanged, so the start of a conversation never depends on how it continues.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgspec

from branchline.chat.token_escapes import Escape
from branchline.core.message import Message, Notation, ToolCall

TemplateMessage = dict[str, Any]
FieldMarker = Callable[[int, str], str]
"""Marks a field of a message, given its number (see `span_finder`) and its text."""

_ID_ALPHABET = string.digits + string.ascii_letters
_MALFORMED_ARGUMENTS = 'zq"odd'
MALFORMED_CALL = Message("assistant", tool_calls=(ToolCall("look", _MALFORMED_ARGUMENTS, "abcdefghi"),))
"""A call whose arguments are not JSON, to test how a template shows such arguments."""
_PLACEHOLDER_KEY = "arguments"
"""The key of the object that wraps malformed arguments."""
_SEPARATOR = "\n\n"
_TAG = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
_BLOCK = re.compile(rf"(?P<opener>{_TAG})(?P<label>[^<>\[\]]*)(?P<closer>{_TAG})\s*\Z")
_TAG_NAME = re.compile("[^a-z]|start|begin|end")
"""What tags have besides their name: `<|START_X|>` and `<|END_X|>`, `<x>` and `</x>` have one name."""

MalformedArgumentsFormat = Literal["text", "value", "object"]
"""How arguments that are not a JSON object are passed: as text; as their JSON value, or as a string if they
are not JSON; or wrapped in an object."""


@dataclass(frozen=True)
class RoleRules:
    """The orders of roles that a template accepts."""

    allows_late_system: bool = True
    """A system message may follow other messages."""
    must_alternate: bool = False
    """User and assistant must alternate."""
    allows_user_after_tool: bool = True
    """A user message may follow a tool result directly."""
    allows_consecutive_system: bool = True
    """A system message may follow another one directly."""

    def apply(self, messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
        """Returns the messages in an order of roles that the template accepts.

        >>> late = {"role": "system", "content": "Be brief."}
        >>> messages = [{"role": "user", "content": "Hi."}, late]
        >>> RoleRules(allows_late_system=False).apply(messages)[1]
        {'role': 'user', 'content': 'Be brief.'}
        >>> RoleRules(allows_late_system=False, must_alternate=True).apply(messages)
        [{'role': 'user', 'content': 'Hi.\\n\\nBe brief.'}]
        """
        ordered: list[TemplateMessage] = []
        last_turn = ""
        for message in messages:
            role, previous = message["role"], ordered[-1]["role"] if ordered else ""
            if role == "system" and previous not in ("", "system") and not self.allows_late_system:
                role = "user"
            if self._merges_into_previous(role, previous, last_turn):
                content = _join_contents(ordered[-1]["content"], message["content"])
                ordered[-1] = ordered[-1] | {"content": content}
                continue
            ordered.append(message if role == message["role"] else message | {"role": role})
            if role == "user" or (role == "assistant" and not message.get("tool_calls")):
                last_turn = role
        return ordered

    def _merges_into_previous(self, role: str, previous: str, last_turn: str) -> bool:
        """Whether a message becomes part of the previous one.

        Only user and assistant messages count as turns; tool calls and results stand between them. So a user
        message may be due after a result, if the conversation starts with a call or a reply precedes it.
        """
        if role == "system":
            return previous == "system" and not self.allows_consecutive_system
        if role != "user":
            return False
        if previous == "tool":
            return not self.allows_user_after_tool and not (self.must_alternate and last_turn != "user")
        return previous == "user" and self.must_alternate


UNRESTRICTED_ROLES = RoleRules()


@dataclass(frozen=True)
class TemplateTraits:
    """What a template accepts and shows."""

    arguments_format: Literal["object", "text"] = "object"
    malformed_arguments_format: MalformedArgumentsFormat = "text"
    requires_null_content: bool = False
    """Empty content next to tool calls must be null."""
    requires_content_parts: bool = False
    """Text must be passed as a list of parts; text that is no part is not shown."""
    call_id_length: int = 0
    """Call ids must have this many characters; 0: any length."""
    shows_tool_calls: bool = True
    shows_reasoning: bool = False
    shows_tools: bool = True
    reasoning_field: str = "reasoning_content"
    """The message field from which the template reads reasoning."""
    reasoning_is_part: bool = False
    """The template reads reasoning from a part of the content: `{"type": "thinking", "thinking": …}`."""
    joins_text_to_reasoning: bool = False
    """The template shows the text next to calls as reasoning; it may refuse a message with both."""
    role_aliases: Mapping[str, str] = field(default_factory=dict)
    """The roles that replace unknown ones, such as `system` for `developer`."""
    role_rules: RoleRules = UNRESTRICTED_ROLES
    generation_prompt: str = ""
    history_reply_prefix: str = ""
    """The text before an earlier reply; it may differ from the generation prompt."""

    @cached_property
    def empty_reasoning_block(self) -> str:
        """The empty reasoning block at the end of the generation prompt, in the template's own spelling.

        >>> TemplateTraits(generation_prompt="<|im_start|>assistant\\n<think></think>").empty_reasoning_block
        '<think></think>'
        """
        block = _BLOCK.search(self.generation_prompt)
        if block is None or (block["label"].strip() and not block["label"].endswith("\n")):
            return ""
        opener, closer = (_TAG_NAME.sub("", block[side].lower()) for side in ("opener", "closer"))
        return block[0] if opener == closer and block["opener"] != block["closer"] else ""

    @cached_property
    def history_reasoning_block(self) -> str:
        """The end of the empty reasoning block that the template shows before an earlier reply."""
        block = self.empty_reasoning_block
        before = self.generation_prompt.removesuffix(block)
        shown = self.history_reply_prefix.removeprefix(before)
        return shown if self.history_reply_prefix.startswith(before) and block.endswith(shown) else ""

    def to_template_messages(
        self,
        messages: Sequence[Message],
        markers: Mapping[int, FieldMarker] | None = None,
        escapes: Mapping[int, Escape] | None = None,
    ) -> list[TemplateMessage]:
        """Returns messages in the form this template accepts, with marked fields for the indices in
        `markers` and escaped texts for those in `escapes`."""
        written: list[TemplateMessage] = []
        template_ids: list[str] = []
        client_ids: list[str] = []
        for index, message in enumerate(messages):
            mark = markers.get(index) if markers else None
            raw = self._message_to_dict(message, mark)
            if message.tool_calls:
                client_ids = [call.id for call in message.tool_calls]
                template_ids = [self._call_id(call_id, index, n) for n, call_id in enumerate(client_ids)]
                raw["tool_calls"] = [
                    {"id": call_id, "type": "function", "function": self._function_to_dict(call, n, mark)}
                    for n, (call, call_id) in enumerate(zip(message.tool_calls, template_ids, strict=True))
                ]
            elif message.role == "tool" and template_ids:
                # Templates pair results with calls by position, and some print the id.
                known = message.tool_call_id in client_ids
                place = client_ids.index(message.tool_call_id) if known else 0
                raw["tool_call_id"] = template_ids.pop(place)
                client_ids.pop(place)
            elif message.role == "tool":
                raw["tool_call_id"] = self._call_id(message.tool_call_id, index, 0)
            written.append(escapes[index](raw) if escapes and index in escapes else raw)
        return written if self.role_rules is UNRESTRICTED_ROLES else self.role_rules.apply(written)

    def _message_to_dict(self, message: Message, mark: FieldMarker | None) -> TemplateMessage:
        """Returns a message without its tool calls."""
        raw: TemplateMessage = {"role": self.role_aliases.get(message.role, message.role)}
        content, reasoning = message.content, message.reasoning_content
        if self.requires_null_content and message.tool_calls and not content:
            raw["content"] = None
        elif message.parts and message.media:
            raw["content"] = [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": part.kind, part.kind: part.url or part.digest}
                for part in message.parts
            ]
        else:
            if mark is not None and (content or not (reasoning or message.tool_calls)):
                # An empty field is marked only if no other field can show where the message is.
                content = mark(0, content)
            raw["content"] = [{"type": "text", "text": content}] if self.requires_content_parts else content
        if reasoning and self.reasoning_is_part:
            part = {"type": "thinking", "thinking": mark(1, reasoning) if mark else reasoning}
            raw["content"] = [part, *_content_parts(raw["content"] or "")]
        elif reasoning:
            raw[self.reasoning_field] = mark(1, reasoning) if mark else reasoning
            if self.joins_text_to_reasoning and message.tool_calls and isinstance(raw["content"], str):
                raw[self.reasoning_field] += f"{_SEPARATOR}{raw['content']}" if raw["content"] else ""
                raw["content"] = ""
        if message.name:
            raw["name"] = message.name
        return raw

    def _function_to_dict(self, call: ToolCall, place: int, mark: FieldMarker | None) -> dict[str, Any]:
        """Returns the name and the arguments of a call, in the form in which the template accepts them."""
        text = call.arguments
        value: Any = text
        if self.arguments_format == "object":
            with suppress(msgspec.DecodeError, UnicodeEncodeError, RecursionError):
                value = msgspec.json.decode(text.strip() or "{}")
            if not isinstance(value, dict) and self.malformed_arguments_format != "value":
                value = text if self.malformed_arguments_format == "text" else {_PLACEHOLDER_KEY: text}
        if mark is None:
            return {"name": call.name, "arguments": value}
        start, end = mark(2 + place, "\0").split("\0")
        if isinstance(value, str):
            return {"name": call.name, "arguments": f"{start}{value}{end}"}
        if not isinstance(value, dict) or not value:
            return {"name": f"{start}{call.name}{end}", "arguments": value}
        # The markers wrap the first and last key: an additional key would be shown as an argument.
        last = len(value) - 1
        keys = [(start * (n == 0)) + key + (end * (n == last)) for n, key in enumerate(value)]
        return {"name": call.name, "arguments": dict(zip(keys, value.values(), strict=True))}

    def _call_id(self, call_id: str, index: int, place: int) -> str:
        if not self.call_id_length or (len(call_id) == self.call_id_length and call_id.isalnum()):
            return call_id or f"call_{index}_{place}"
        number, digits = index * 64 + place + 1, ""
        while number:
            number, digit = divmod(number, len(_ID_ALPHABET))
            digits = _ID_ALPHABET[digit] + digits
        return digits.rjust(self.call_id_length, "0")


def _join_contents(first: Any, second: Any) -> Any:
    """Joins two contents: two texts to a text, anything else to a list of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return _SEPARATOR.join(filter(None, (first, second)))
    before, after = _content_parts(first), _content_parts(second)
    if before and after and before[-1]["type"] == after[0]["type"] == "text":
        # One text part, because templates trim parts and put nothing between them.
        joined = _join_contents(before.pop()["text"], after.pop(0)["text"])
        before.append({"type": "text", "text": joined})
    return [*before, *after]


def _content_parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def has_malformed_arguments(message: Message) -> bool:
    """Whether a call of the message has arguments that are not a JSON object.

    Templates show such arguments in ways of their own, so the rendered text is not compared with the sample.
    """
    return any(
        call.notation not in (Notation.JSON, Notation.EMPTY) or not call.canonical_arguments.startswith(b"{")
        for call in message.tool_calls
    )


def detect_malformed_arguments_format(rendered: str) -> MalformedArgumentsFormat:
    """Returns the format to use, given how a template rendered `MALFORMED_CALL` with text arguments."""
    if _MALFORMED_ARGUMENTS in rendered:
        return "text"
    return "value" if json.dumps(_MALFORMED_ARGUMENTS) in rendered else "object"
