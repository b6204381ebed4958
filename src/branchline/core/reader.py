"""Reads messages as clients write them (Chat Completions and its dialects) into canonical ones.

Tolerant where clients differ (null, empty or absent content, part lists, arguments as objects, reasoning
under any of its names), strict where a guess would change meaning: every refusal names the field.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import xxhash

from branchline.core.arguments import canonical_json
from branchline.core.errors import MessageError
from branchline.core.message import ROLES, Form, Media, MediaKind, Message, Role, ToolCall

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking", "reasoning_text")
"""Plain-text wire names of reasoning, in the order they are looked for."""
REASONING_LISTS = ("reasoning_details", "thinking_blocks")
"""Wire names under which reasoning comes as a list of blocks."""

_KNOWN_ROLES = frozenset(ROLES)
_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
_REASONING_PARTS = frozenset(("thinking", "reasoning", "reasoning.text", "reasoning.summary", "summary_text"))
_SILENT_PARTS = frozenset(("redacted_thinking", "reasoning.encrypted"))
_MEDIA_PARTS: dict[str, MediaKind] = {
    "image_url": "image",
    "image": "image",
    "input_image": "image",
    "video_url": "video",
    "video": "video",
    "input_video": "video",
    "audio_url": "audio",
    "audio": "audio",
    "input_audio": "audio",
    "file": "file",
    "input_file": "file",
}


def read_messages(raw: object, where: str = "messages") -> tuple[Message, ...]:
    """A request's messages.

    >>> read_messages([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])[0].text
    'hi'
    """
    if not isinstance(raw, list | tuple) or not raw:
        raise MessageError(where, raw, "a non-empty list of messages")
    return tuple([read_message(message, where, index) for index, message in enumerate(raw)])


def read_message(raw: object, where: str = "message", index: int | None = None) -> Message:
    """One message; errors name the field by where it stands."""
    if not isinstance(raw, dict):
        raise MessageError(_place(where, index), raw, "an object")
    role = raw.get("role")
    if role not in _KNOWN_ROLES:
        raise MessageError(f"{_place(where, index)}.role", role, "one of " + ", ".join(ROLES))
    content = raw.get("content")
    # Most messages of most requests are a role and a text: they are read without looking further.
    if type(content) is str and len(raw) == 2:
        return Message(role, content)
    return _read_full(raw, role, content, _place(where, index))


def _place(where: str, index: int | None) -> str:
    return where if index is None else f"{where}[{index}]"


def _read_full(raw: dict[str, Any], role: Role, content: object, where: str) -> Message:
    form = Form.PLAIN
    refusal = _text_or_none(raw.get("refusal"), f"{where}.refusal")
    reasoning = _read_reasoning(raw, where)
    parts: tuple[str | Media, ...] = ()
    if isinstance(content, str):
        text = content
    elif content is None:
        form |= Form.NULL_CONTENT if "content" in raw else Form.NO_CONTENT
        text = ""
    elif isinstance(content, list | tuple):
        form |= Form.PART_LIST
        read = [_read_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
        parts = tuple(part for kind, part in read if kind == "content")
        text = "".join(part for part in parts if isinstance(part, str))
        reasoning += "".join(cast(str, part) for kind, part in read if kind == "reasoning")
        refusal += "".join(cast(str, part) for kind, part in read if kind == "refusal")
        if all(isinstance(part, str) for part in parts) and len(parts) < 2:
            parts = ()
    else:
        raise MessageError(f"{where}.content", content, "a string, null or a list of parts")
    calls, calls_form = _read_calls(raw, where)
    return Message(
        role,
        text,
        reasoning=reasoning,
        calls=calls,
        refusal=refusal,
        name=_text_or_none(raw.get("name"), f"{where}.name"),
        answers=_text_or_none(raw.get("tool_call_id"), f"{where}.tool_call_id"),
        parts=parts,
        id=_text_or_none(raw.get("id"), f"{where}.id"),
        form=int(form | calls_form),
    )


def _text_or_none(value: object, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MessageError(where, value, "a string or null")
    return value


def _read_reasoning(raw: Mapping[str, Any], where: str) -> str:
    for name in REASONING_NAMES:
        value = raw.get(name)
        if isinstance(value, str):
            if value:
                return value
        elif value is not None:
            raise MessageError(f"{where}.{name}", value, "a string or null")
    for name in REASONING_LISTS:
        blocks = raw.get(name)
        if blocks:
            if not isinstance(blocks, list):
                raise MessageError(f"{where}.{name}", blocks, "a list of blocks")
            return "".join(_block_text(block) for block in blocks if isinstance(block, dict))
    return ""


def _block_text(block: Mapping[str, Any]) -> str:
    for name in ("text", "thinking", "summary", "reasoning"):
        value = block.get(name)
        if isinstance(value, str):
            return value
    return ""


def _read_part(part: object, where: str) -> tuple[str, str | Media]:
    if isinstance(part, str):
        return "content", part
    if not isinstance(part, dict):
        raise MessageError(where, part, "a content part (an object with a type)")
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        text = part.get("text")
        if not isinstance(text, str):
            raise MessageError(f"{where}.text", text, "a string")
        return "content", text
    if kind == "refusal":
        return "refusal", _text_or_none(part.get("refusal"), f"{where}.refusal")
    if kind in _REASONING_PARTS:
        return "reasoning", _block_text(part)
    if kind in _SILENT_PARTS:
        return "reasoning", ""
    if kind in _MEDIA_PARTS:
        return "content", _read_media(part, _MEDIA_PARTS[kind], where)
    known = sorted({*_TEXT_PARTS, *_MEDIA_PARTS, "refusal", "thinking"})
    raise MessageError(f"{where}.type", kind, "one of " + ", ".join(known))


def _read_media(part: Mapping[str, Any], kind: MediaKind, where: str) -> Media:
    body = part.get(part["type"], part.get(kind, part))
    detail = mime = ""
    if isinstance(body, Mapping):
        detail = _text_or_none(body.get("detail"), f"{where}.detail")
        mime = body.get("format") or body.get("mime_type") or body.get("media_type") or ""
        names = ("url", "data", "file_data", "file_id", "image", "video", "audio", "path")
        body = next((body[name] for name in names if isinstance(body.get(name), str)), None)
    if not isinstance(body, str) or not body:
        raise MessageError(where, part, f"{kind} data: a url, a data url, or base64 data")
    if body.startswith("data:"):
        head, _, encoded = body.partition(",")
        mime = head[5:].partition(";")[0]
        payload = _base64(encoded, where) if ";base64" in head else encoded.encode()
    elif kind == "audio" and "://" not in body:
        payload = _base64(body, where)
    else:
        return Media(kind, digest="url:" + body, url=body, mime=str(mime), detail=detail)
    return Media(kind, xxhash.xxh3_128_hexdigest(payload), payload, mime=str(mime), detail=detail)


def _base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MessageError(where, text[:40], "base64 data") from None


def _read_calls(raw: Mapping[str, Any], where: str) -> tuple[tuple[ToolCall, ...], Form]:
    calls = raw.get("tool_calls")
    if not calls:
        if calls is not None and not isinstance(calls, list):
            raise MessageError(f"{where}.tool_calls", calls, "a list or null")
        legacy = raw.get("function_call")
        if legacy is not None:
            return (_read_function(legacy, "", "function", f"{where}.function_call"),), Form.PLAIN
        if "tool_calls" not in raw:
            return (), Form.PLAIN
        return (), Form.NULL_CALLS if calls is None else Form.EMPTY_CALLS
    if not isinstance(calls, list | tuple):
        raise MessageError(f"{where}.tool_calls", calls, "a list or null")
    return tuple(
        _read_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)
    ), Form.PLAIN


def _read_call(raw: object, where: str) -> ToolCall:
    if not isinstance(raw, dict):
        raise MessageError(where, raw, "a tool call (an object with a function)")
    kind = raw.get("type") or "function"
    body = raw.get(kind, raw.get("function", raw))
    return _read_function(body, _text_or_none(raw.get("id"), f"{where}.id"), str(kind), where)


def _read_function(body: object, call_id: str, kind: str, where: str) -> ToolCall:
    if not isinstance(body, dict):
        raise MessageError(f"{where}.function", body, "an object with name and arguments")
    name = body.get("name")
    if not isinstance(name, str) or not name:
        raise MessageError(f"{where}.function.name", name, "a non-empty string")
    arguments = body.get("arguments", body.get("input"))
    if arguments is None:
        arguments = ""
    elif not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(name, arguments, call_id, kind)


def read_tools(raw: object, where: str = "tools") -> tuple[dict[str, Any], ...]:
    """A request's tool list; null, absent and empty are the same."""
    if not raw:
        return ()
    if not isinstance(raw, list | tuple) or not all(isinstance(tool, dict) for tool in raw):
        raise MessageError(where, raw, "a list of tools (objects) or null")
    return tuple(raw)


def digest_of(*values: object) -> bytes:
    """16 bytes that identify JSON values, key order aside; nothing but empty values gives no bytes at all."""
    if not any(values):
        return b""
    return xxhash.xxh3_128_digest(b"\0".join(canonical_json(value) for value in values))


def write_message(message: Message) -> dict[str, Any]:
    """A message in Chat Completions form, for logs, demos and templates."""
    raw: dict[str, Any] = {"role": message.role}
    if message.parts:
        raw["content"] = [_write_part(part) for part in message.parts]
    else:
        raw["content"] = message.text
    if message.reasoning:
        raw["reasoning_content"] = message.reasoning
    if message.refusal:
        raw["refusal"] = message.refusal
    if message.calls:
        raw["tool_calls"] = [_write_call(call) for call in message.calls]
    if message.name:
        raw["name"] = message.name
    if message.answers:
        raw["tool_call_id"] = message.answers
    return raw


def _write_part(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = f"{part.kind}_url"
    if part.url:
        return {"type": kind, kind: {"url": part.url}}
    data = base64.b64encode(part.payload).decode()
    return {"type": kind, kind: {"url": f"data:{part.mime or 'application/octet-stream'};base64,{data}"}}


def _write_call(call: ToolCall) -> dict[str, Any]:
    body = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": body}
