"""How one chat template wants to be spoken to, found out by trying.

Templates differ in what they accept (arguments as object or text, null content, ids of nine letters) and
in what they do (show reasoning, strip it later, fold tool results). Each is probed once when the template is
loaded; a probe that the template refuses simply tells us so.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from branchline.chat.generic.template import ChatTemplate
from branchline.core.errors import TemplateError
from branchline.core.message import Media, Message, ToolCall

Values = Mapping[str, Any]
Mark = Callable[[int, str], str]

_LETTERS = string.digits + string.ascii_letters
_ASK, _SAID, _THOUGHT, _ARG, _RESULT = "zqask", "zqsaid", "zqthought", "zqarg", "zqresult"
_TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
]


@dataclass(frozen=True)
class Dialect:
    """What a template accepts and shows."""

    arguments: Literal["object", "text"] = "object"
    null_content: bool = False
    """Content must be null beside tool calls."""
    id_length: int = 0
    """Ids of tool calls must have this many letters; 0: as they are."""
    shows_calls: bool = True
    shows_reasoning: bool = False
    shows_tools: bool = True
    generation_prompt: str = ""

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
        return written

    def _write(self, index: int, message: Message, mark: Mark | None) -> dict[str, Any]:
        raw: dict[str, Any] = {"role": message.role}
        raw["content"] = _content(message, mark)
        if message.reasoning:
            raw["reasoning_content"] = mark(1, message.reasoning) if mark else message.reasoning
        if message.name:
            raw["name"] = message.name
        if message.calls:
            if self.null_content and not message.text:
                raw["content"] = None
            raw["tool_calls"] = [
                {
                    "id": self._call_id(call.id, index, place),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": self._arguments(call, place, mark),
                    },
                }
                for place, call in enumerate(message.calls)
            ]
        return raw

    def _arguments(self, call: ToolCall, place: int, mark: Mark | None) -> Any:
        value: Any = call.arguments
        if self.arguments == "object":
            try:
                value = msgspec.json.decode(call.arguments or "{}")
            except (msgspec.DecodeError, UnicodeEncodeError):
                value = call.arguments
        if mark is None:
            return value
        both = mark(2 + place, "\0").split("\0")
        if isinstance(value, dict):
            # Around what the object holds: its own spelling is not ours to compare.
            return {both[0]: 1, **value, "z" + both[1]: 1}
        return f"{both[0]}{value}{both[1]}" if isinstance(value, str) else [both[0], value, both[1]]

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


def probe_dialect(template: ChatTemplate, values: Values | None = None) -> Dialect:
    """Finds out how a template wants to be spoken to."""
    found = Dialect(generation_prompt=_generation_prompt(template, values))
    call = Message("assistant", "", calls=(ToolCall("look", f'{{"at": "{_ARG}"}}', "abcdefghi"),))
    result = Message("tool", _RESULT, answers="abcdefghi", name="look")
    talk = [Message("user", _ASK), call, result]
    shown = ""
    for arguments in ("object", "text"):
        for null_content in (False, True):
            candidate = Dialect(arguments, null_content, generation_prompt=found.generation_prompt)
            text = _try(template, candidate.write(talk), _TOOLS, values)
            # Neither a text that was quoted again nor Python's idea of an object is how the model writes it.
            if _ARG in text and _RESULT in text and '\\"at' not in text and "{'at'" not in text:
                found, shown = candidate, text
                break
        if shown:
            break
    shows_calls = bool(shown)
    id_length = 0
    if shows_calls:
        other = Message("assistant", "", calls=(ToolCall("look", f'{{"at": "{_ARG}"}}', "call_1"),))
        renamed = [Message("user", _ASK), other, Message("tool", _RESULT, answers="call_1", name="look")]
        if not _try(template, found.write(renamed), _TOOLS, values):
            id_length = 9
    thought = [Message("user", _ASK), Message("assistant", _SAID, reasoning=_THOUGHT)]
    # Some show it inside a tool cycle, some only on the last message.
    reasoned = _try(template, found.write([*thought, Message("tool", _RESULT)]), None, values)
    reasoned += _try(template, found.write(thought), None, values)
    ask = [Message("user", _ASK)]
    with_tools = _try(template, found.write(ask), _TOOLS, values)
    return Dialect(
        found.arguments,
        found.null_content,
        id_length,
        shows_calls,
        _THOUGHT in reasoned,
        "look" in with_tools,
        found.generation_prompt,
    )


def _generation_prompt(template: ChatTemplate, values: Values | None) -> str:
    ask = [{"role": "user", "content": _ASK}]
    without = _try(template, ask, None, values, generation_prompt=False)
    whole = _try(template, ask, None, values)
    return whole[len(without) :] if whole.startswith(without) else ""


def _try(
    template: ChatTemplate,
    messages: Sequence[Values],
    tools: Sequence[Values] | None,
    values: Values | None,
    *,
    generation_prompt: bool = True,
) -> str:
    try:
        return template.render(messages, tools, values, generation_prompt=generation_prompt)
    except TemplateError:
        return ""
