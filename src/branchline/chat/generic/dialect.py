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

from branchline.chat.generic.template import ChatTemplate
from branchline.chat.generic.turns import ANY_TURNS, Turns
from branchline.core.errors import TemplateError
from branchline.core.message import Media, Message, ToolCall
from branchline.core.reader import REASONING_NAMES

Values = Mapping[str, Any]
Mark = Callable[[int, str], str]

_LETTERS = string.digits + string.ascii_letters
_ASK, _SAID, _THOUGHT, _ARG, _RESULT = "zqask", "zqsaid", "zqthought", "zqarg", "zqresult"
_ODD = 'zq"odd'
ODD_CALL = Message("assistant", "", calls=(ToolCall("look", _ODD, "abcdefghi"),))
"""A call whose arguments are no JSON: what comes of it when it is shown says how it may be."""
_STAND_IN = "arguments"
"""The key of the object that stands in for arguments that are none."""
_TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
]


OddArguments = Literal["text", "value", "object"]
"""How arguments that are no JSON object are shown: as they were written, as the value they are if they are
JSON and as a string if not, or in an object that stands in for them."""


@dataclass(frozen=True)
class Dialect:
    """What a template accepts and shows."""

    arguments: Literal["object", "text"] = "object"
    odd_arguments: OddArguments = "text"
    null_content: bool = False
    """Content must be null beside tool calls."""
    id_length: int = 0
    """Ids of tool calls must have this many letters; 0: as they are."""
    shows_calls: bool = True
    shows_reasoning: bool = False
    shows_tools: bool = True
    reasoning_field: str = "reasoning_content"
    """Where the template looks for reasoning."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """What a role it does not know is shown as: a developer's words as the system's."""
    turns: Turns = ANY_TURNS
    generation_prompt: str = ""
    history_prompt: str = ""
    """What stands before an earlier reply's text; not always the generation prompt."""

    def write(
        self, messages: Sequence[Message], bracket: Mapping[int, Mark] | None = None
    ) -> list[dict[str, Any]]:
        """Messages as this template wants them; fields of messages in `bracket` are marked."""
        written: list[dict[str, Any]] = []
        results: list[str] = []
        for index, message in enumerate(messages):
            mark = bracket.get(index) if bracket else None
            raw = self._write(index, message, mark)
            if message.calls:
                results = [call["id"] for call in raw["tool_calls"]]
                wire = [call.id for call in message.calls]
            elif message.role == "tool" and results:
                # Templates pair results with calls by position, and some print the id.
                place = wire.index(message.answers) if message.answers in wire else 0
                raw["tool_call_id"] = results.pop(min(place, len(results) - 1))
                wire.pop(min(place, len(wire) - 1))
            elif message.role == "tool":
                raw["tool_call_id"] = self._call_id(message.answers, index, 0)
            written.append(raw)
        return written if self.turns is ANY_TURNS else self.turns.order(written)

    def _write(self, index: int, message: Message, mark: Mark | None) -> dict[str, Any]:
        raw: dict[str, Any] = {"role": self.roles.get(message.role, message.role)}
        raw["content"] = _content(message, mark)
        if message.reasoning:
            raw[self.reasoning_field] = mark(1, message.reasoning) if mark else message.reasoning
        if message.name:
            raw["name"] = message.name
        if message.calls:
            if self.null_content and not message.text:
                raw["content"] = None
            raw["tool_calls"] = [
                {
                    "id": self._call_id(call.id, index, place),
                    "type": "function",
                    "function": self._function(call, place, mark),
                }
                for place, call in enumerate(message.calls)
            ]
        return raw

    def _function(self, call: ToolCall, place: int, mark: Mark | None) -> dict[str, Any]:
        value = self._arguments(call.arguments)
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

    def _arguments(self, text: str) -> Any:
        """Arguments in the shape in which the template takes them."""
        if self.arguments == "text":
            return text
        value: Any = text
        with suppress(msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            value = msgspec.json.decode(text.strip() or "{}")
        if isinstance(value, dict) or self.odd_arguments == "value":
            return value
        return text if self.odd_arguments == "text" else {_STAND_IN: text}

    def _call_id(self, wanted: str, index: int, place: int) -> str:
        if not self.id_length or (len(wanted) == self.id_length and wanted.isalnum()):
            return wanted or f"call_{index}_{place}"
        number, letters = index * 64 + place + 1, ""
        while number:
            number, digit = divmod(number, len(_LETTERS))
            letters = _LETTERS[digit] + letters
        return letters.rjust(self.id_length, "0")


def _content(message: Message, mark: Mark | None) -> Any:
    if message.media:
        return [
            {"type": "text", "text": part} if isinstance(part, str) else _media(part)
            for part in message.parts
        ]
    if mark is None:
        return message.text
    # A field that is empty is not marked, unless nothing else could show where the message stands.
    return mark(0, message.text) if message.text or not (message.reasoning or message.calls) else ""


def _media(media: Media) -> dict[str, Any]:
    return {"type": media.kind, media.kind: media.url or media.digest}


def has_odd_arguments(message: Message) -> bool:
    """Whether a message has a call whose arguments are no JSON object.

    What a template makes of them is its own affair, so nobody can hold it against what was sampled.
    """
    return any(not (call.is_json and call.meaning.startswith(b"{")) for call in message.calls)


def odd_arguments_in(shown: str) -> OddArguments:
    """How a conversation with the odd call should show it, given what became of its arguments as a text."""
    if _ODD in shown:
        return "text"
    return "value" if json.dumps(_ODD) in shown else "object"


def probe_dialect(
    template: ChatTemplate, values: Values | None = None, now: datetime | None = None
) -> Dialect:
    """Finds out how a template wants to be spoken to."""
    tried = _Trial(template, values, now or datetime.now())
    opening, before = tried.openings()
    found = Dialect(generation_prompt=opening, history_prompt=before)
    call = Message("assistant", "", calls=(ToolCall("look", f'{{"at": "{_ARG}"}}', "abcdefghi"),))
    result = Message("tool", _RESULT, answers="abcdefghi", name="look")
    shown = ""
    for arguments, null_content in product(("object", "text"), (False, True)):
        candidate = replace(found, arguments=arguments, null_content=null_content)  # type: ignore[arg-type]
        text = tried.render(candidate, [Message("user", _ASK), call, result], _TOOLS)
        # Neither a text that was quoted again nor Python's idea of an object is how the model writes it.
        if _ARG in text and _RESULT in text and '\\"at' not in text and "{'at'" not in text:
            found, shown = candidate, text
            break
    found = replace(found, shows_calls=bool(shown))
    if shown:
        other = Message("assistant", "", calls=(ToolCall("look", f'{{"at": "{_ARG}"}}', "call_1"),))
        renamed = [Message("user", _ASK), other, Message("tool", _RESULT, answers="call_1", name="look")]
        if not tried.render(found, renamed, _TOOLS):
            found = replace(found, id_length=9)
        odd = tried.render(found, [Message("user", _ASK), ODD_CALL, result], _TOOLS)
        found = replace(found, odd_arguments=odd_arguments_in(odd))
    roles = {
        role: stand_in
        for role, stand_in in (("developer", "system"), ("function", "tool"))
        if _SAID not in tried.render(found, [Message(role, _SAID), Message("user", _ASK)])  # type: ignore[arg-type]
    }
    found = replace(
        found, roles=roles, shows_tools="look" in tried.render(found, [Message("user", _ASK)], _TOOLS)
    )
    found = replace(found, turns=tried.turns(found, [call, result] if shown else []))
    for name in REASONING_NAMES:
        candidate = replace(found, reasoning_field=name)
        if tried.shows_thought(candidate, call, result):
            return replace(candidate, shows_reasoning=True)
    return found


@dataclass(frozen=True)
class _Trial:
    """Renders that a template may refuse; a refusal is an empty text."""

    template: ChatTemplate
    values: Values | None
    now: datetime

    def render(
        self,
        dialect: Dialect,
        messages: Sequence[Message],
        tools: Sequence[Values] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        try:
            return self.template.render(
                dialect.write(messages), tools, self.values, now=self.now, generation_prompt=generation_prompt
            )
        except TemplateError:
            return ""

    def openings(self) -> tuple[str, str]:
        """What the template opens a reply with, and what stands before an earlier one."""
        plain, ask = Dialect(), Message("user", _ASK)
        body = self.render(plain, [ask], generation_prompt=False)
        whole = self.render(plain, [ask])
        opening = whole[len(body) :] if whole.startswith(body) else ""
        talk = self.render(plain, [ask, Message("assistant", _SAID), Message("user", _RESULT)])
        place = talk.find(_SAID)
        return opening, talk[len(body) : place] if place >= 0 and talk.startswith(
            body
        ) and opening else opening

    def turns(self, dialect: Dialect, call_and_result: Sequence[Message]) -> Turns:
        """What the template takes of who speaks when. Where nothing helps it is left as it is."""
        ask, said = Message("user", _ASK), Message("assistant", _SAID)
        again, late = Message("user", _THOUGHT), Message("system", _ARG)
        found = ANY_TURNS

        def takes(turns: Turns, *messages: Message) -> bool:
            text = self.render(replace(dialect, turns=turns), messages, _TOOLS if call_and_result else None)
            return all(message.text in text for message in messages)

        def learn(messages: Sequence[Message], **change: bool) -> None:
            nonlocal found
            if not takes(found, *messages) and takes(replace(found, **change), *messages):
                found = replace(found, **change)

        learn([ask, said, again, Message("user", _RESULT)], in_turn=True)
        learn([late, Message("system", _RESULT), ask], second_system=False)
        learn([ask, said, late, again], late_system=False)
        if call_and_result:
            learn([ask, *call_and_result, again], words_after_result=False)
        return found

    def shows_thought(self, dialect: Dialect, call: Message, result: Message) -> bool:
        """Some show reasoning inside a tool cycle, some beside a call, some only on the last message."""
        ask, said = Message("user", _ASK), Message("assistant", _SAID, reasoning=_THOUGHT)
        beside = Message("assistant", "", reasoning=_THOUGHT, calls=call.calls)
        talks = ([ask, said, Message("tool", _RESULT)], [ask, said], [ask, beside, result])
        return any(_THOUGHT in self.render(dialect, talk) for talk in talks)
