"""Reads JSON from clients: fields, and messages in Chat Completions form and its variants.

Accepts every form of a message that clients use (null, empty or absent content, part lists, arguments as
objects, reasoning under any of its field names) and rejects what could only be guessed. An error names the
field relative to the function that raises it; each caller adds its own prefix.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
import xxhash

from branchline.core.errors import InputError, MessageError
from branchline.core.message import ROLES, Media, MediaKind, Message, ToolCall, WireShape

REASONING_TEXT_FIELDS = ("reasoning_content", "reasoning", "thinking", "reasoning_text")
"""Fields that hold reasoning as text, in order of precedence."""
REASONING_LIST_FIELDS = ("reasoning_details", "thinking_blocks")
"""Fields that hold reasoning as a list of blocks."""
MEDIA_PART_KINDS: dict[str, MediaKind] = {
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
"""Content part types that hold media, and their kind."""

_KNOWN_ROLES = frozenset(ROLES)
_REASONING_FIELDS = frozenset((*REASONING_TEXT_FIELDS, *REASONING_LIST_FIELDS))
_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
_REASONING_PARTS = frozenset(
    ("thinking", "reasoning", "reasoning_text", "reasoning.text", "reasoning.summary", "summary_text")
)
_IGNORED_PARTS = frozenset(("redacted_thinking", "reasoning.encrypted"))
_EXPECTED_PART_TYPES = "one of " + ", ".join(sorted({*_TEXT_PARTS, *MEDIA_PART_KINDS, "refusal", "thinking"}))
_DATA_FIELDS = ("data", "file_data", "input_audio")
_LINK_FIELDS = ("url", "file_id", "path")

# Plain ints: combining enum flags takes longer than reading a message.
_PLAIN, _PART_LIST = int(WireShape.PLAIN), int(WireShape.PART_LIST)
_NULL_CONTENT, _ABSENT_CONTENT = int(WireShape.NULL_CONTENT), int(WireShape.ABSENT_CONTENT)
_NULL_CALLS, _EMPTY_CALLS = int(WireShape.NULL_CALLS), int(WireShape.EMPTY_CALLS)


# -- fields ------------------------------------------------------------------------------------------


def prefix_error(prefix: str, error: MessageError) -> MessageError:
    """Returns the error with `prefix` before its field name."""
    field = error.field
    dot = "." if prefix and field else ""
    return MessageError(prefix + dot + field, error.value, error.expected)


def read_text_field(raw: Mapping[str, Any], name: str) -> str:
    """Returns a string field, or "" if it is null or absent."""
    value = raw.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MessageError(name, value, "a string or null")
    return value if value.isascii() else replace_surrogates(value)


def replace_surrogates_deep(value: Any) -> Any:
    """Returns a JSON value with `replace_surrogates` applied to every text."""
    try:
        return _replace_surrogates_deep(value)
    except RecursionError:
        raise InputError("got a JSON value that is nested too deep, expected less nesting") from None


def _replace_surrogates_deep(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {
            replace_surrogates(key) if isinstance(key, str) else key: _replace_surrogates_deep(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replace_surrogates_deep(item) for item in value]
    return value


def replace_surrogates(text: str) -> str:
    """Returns text that UTF-8 can encode: JSON may hold half a surrogate pair, which tokenizers reject."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def decode_json(data: bytes | msgspec.Raw) -> Any:
    """Decodes JSON. Half a surrogate pair, which JavaScript writes when it cuts a text, is replaced."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        return replace_surrogates_deep(_load_surrogates(data, error))


def decode_json_keeping_surrogates(data: bytes) -> Any:
    """Decodes JSON. Half a surrogate pair is kept, because the next text of a stream may have the other."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        return _load_surrogates(data, error)


def _load_surrogates(data: bytes | msgspec.Raw, error: msgspec.DecodeError) -> Any:
    """Decodes JSON that has half a surrogate pair; raises `error` if it has none or is no JSON."""
    text = bytes(data)
    if b"\\ud" not in text.lower():
        raise error
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except ValueError:
        raise error from None


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# -- messages ----------------------------------------------------------------------------------------


def read_messages(raw: object, field_path: str = "messages") -> tuple[Message, ...]:
    """Reads the messages of a request.

    >>> read_messages([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])[0].content
    'hi'
    """
    if not isinstance(raw, list | tuple) or not raw:
        raise MessageError(field_path, raw, "a non-empty list of messages")
    return tuple([read_message(message, field_path, index) for index, message in enumerate(raw)])


def read_message(raw: object, field_path: str = "message", index: int | None = None) -> Message:
    """Reads one message; errors name the field, prefixed with `field_path` and `index`."""
    try:
        if not isinstance(raw, dict):
            raise MessageError("", raw, "an object")
        role = raw.get("role")
        if not isinstance(role, str) or role not in _KNOWN_ROLES:
            raise MessageError("role", role, "one of " + ", ".join(ROLES))
        content = raw.get("content")
        shape = _PLAIN
        text = part_reasoning = part_refusal = ""
        parts: tuple[str | Media, ...] = ()
        if isinstance(content, str):
            text = content if content.isascii() else replace_surrogates(content)
            if len(raw) == 2:  # most messages have only a role and a text
                return Message(role, text)
        elif content is None:
            shape = _NULL_CONTENT if "content" in raw else _ABSENT_CONTENT
        elif isinstance(content, list | tuple):
            shape = _PART_LIST
            parts, part_reasoning, part_refusal = _read_parts(content)
            text = "".join([part for part in parts if isinstance(part, str)])
            if len(parts) < 2 and not any(isinstance(part, Media) for part in parts):
                parts = ()
        else:
            raise MessageError("content", content, "a string, null or a list of parts")
        reasoning = "" if _REASONING_FIELDS.isdisjoint(raw) else _read_reasoning(raw)
        calls: tuple[ToolCall, ...] = ()
        if "tool_calls" in raw or "function_call" in raw:
            calls, calls_shape = _read_tool_calls(raw)
            shape |= calls_shape
        return Message(
            role,
            text,
            reasoning_content=reasoning + part_reasoning,
            tool_calls=calls,
            refusal=read_text_field(raw, "refusal") + part_refusal,
            name=read_text_field(raw, "name"),
            tool_call_id=read_text_field(raw, "tool_call_id"),
            parts=parts,
            id=read_text_field(raw, "id"),
            wire_shape=shape,
        )
    except MessageError as error:
        raise prefix_error(field_path if index is None else f"{field_path}[{index}]", error) from None


# -- reasoning ---------------------------------------------------------------------------------------


def _read_reasoning(raw: Mapping[str, Any]) -> str:
    for name in REASONING_TEXT_FIELDS:
        text = read_text_field(raw, name)
        if text:
            return text
    for name in REASONING_LIST_FIELDS:
        blocks = raw.get(name)
        if blocks is None:
            continue
        if not isinstance(blocks, list | tuple):
            raise MessageError(name, blocks, "a list of blocks or null")
        text = "".join(
            [_read_reasoning_block(block, f"{name}[{index}]") for index, block in enumerate(blocks)]
        )
        if text:
            return text
    return ""


def _read_reasoning_block(block: object, where: str) -> str:
    if isinstance(block, str):
        return replace_surrogates(block)
    if not isinstance(block, dict):
        raise MessageError(where, block, "a block of reasoning (an object)")
    for name in ("text", "thinking", "summary", "reasoning", "content"):
        value = block.get(name)
        if isinstance(value, str):
            return replace_surrogates(value)
        if isinstance(value, list):
            # Mistral's `thinking` and the `summary` of Responses are lists of texts.
            texts = [item.get("text") if isinstance(item, dict) else item for item in value]
            return replace_surrogates("".join([text for text in texts if isinstance(text, str)]))
    return ""


# -- parts -------------------------------------------------------------------------------------------


def _read_parts(content: Sequence[object]) -> tuple[tuple[str | Media, ...], str, str]:
    """Returns the content parts, the reasoning and the refusal of a part list."""
    parts: list[str | Media] = []
    reasoning = refusal = ""
    for index, part in enumerate(content):
        if isinstance(part, str):
            parts.append(replace_surrogates(part))
            continue
        try:
            if not isinstance(part, dict):
                raise MessageError("", part, "a content part (an object with a type)")
            kind = part.get("type")
            if not isinstance(kind, str):
                raise MessageError("type", kind, _EXPECTED_PART_TYPES)
            if kind in _TEXT_PARTS:
                text = part.get("text")
                if not isinstance(text, str):
                    raise MessageError("text", text, "a string")
                parts.append(replace_surrogates(text))
            elif kind in MEDIA_PART_KINDS:
                parts.append(read_media_part(part, kind))
            elif kind in _REASONING_PARTS:
                reasoning += _read_reasoning_block(part, "")
            elif kind == "refusal":
                refusal += read_text_field(part, "refusal")
            elif kind not in _IGNORED_PARTS:
                raise MessageError("type", kind, _EXPECTED_PART_TYPES)
        except MessageError as error:
            raise prefix_error(f"content[{index}]", error) from None
    return tuple(parts), reasoning, refusal


# -- media -------------------------------------------------------------------------------------------


def read_media_part(part: Mapping[str, Any], part_type: str) -> Media:
    """Reads the media of a content part.

    The digest identifies the bytes, whatever their encoding on the wire; a link is identified by its URL.
    """
    kind = MEDIA_PART_KINDS[part_type]
    # The data is beside the type, or in a nested object.
    names = (part_type, f"{kind}_url", kind)
    nested = next((name for name in (*names, "source") if isinstance(part.get(name), dict)), "")
    try:
        return _read_media(part[nested] if nested else part, kind, names)
    except MessageError as error:
        raise prefix_error(nested, error) from None


def _read_media(body: Mapping[str, Any], kind: MediaKind, names: Sequence[str]) -> Media:
    for name in (*_DATA_FIELDS, *_LINK_FIELDS, *names):
        source = body.get(name)
        if isinstance(source, str) and source:
            source = replace_surrogates(source)
            break
    else:
        raise MessageError("", body, f"{kind} data: a url, a data url, or base64 data")
    detail = read_text_field(body, "detail")
    mime = (
        read_text_field(body, "mime_type")
        or read_text_field(body, "media_type")
        or read_text_field(body, "format")
    )
    if source.startswith("data:"):
        mime, payload = _read_data_url(source, name)
    elif name in _DATA_FIELDS and "://" not in source:
        payload = _decode_base64(source, name)
        mime = mime if "/" in mime or not mime else f"{kind}/{mime}"
    else:
        return Media(kind, digest="url:" + source, url=source, mime=mime, detail=detail)
    return Media(kind, xxhash.xxh3_128_hexdigest(payload), payload, mime=mime, detail=detail)


def _read_data_url(url: str, name: str) -> tuple[str, bytes]:
    head, comma, data = url[len("data:") :].partition(",")
    mime, *options = head.split(";")
    plain = unquote_to_bytes(data.encode("utf-8", "surrogatepass"))
    if not comma or not plain:
        raise MessageError(name, url, "a data url with data after a comma")
    return mime, _decode_base64(plain, name) if "base64" in options else plain


def _decode_base64(text: str | bytes, name: str) -> bytes:
    """Decodes base64 with or without line breaks and padding, in the standard or the URL-safe alphabet."""
    data = b"".join((text.encode("utf-8", "replace") if isinstance(text, str) else text).split())
    data = data.rstrip(b"=").translate(_URL_SAFE_TO_STANDARD)
    try:
        payload = base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except binascii.Error:
        payload = b""
    if not payload:
        raise MessageError(name, text, "base64 data")
    return payload


_URL_SAFE_TO_STANDARD = bytes.maketrans(b"-_", b"+/")


# -- tool calls --------------------------------------------------------------------------------------


def _read_tool_calls(raw: Mapping[str, Any]) -> tuple[tuple[ToolCall, ...], int]:
    """Returns the tool calls of a message and the wire shape of an empty list of calls."""
    raw_calls = raw.get("tool_calls")
    if raw_calls is not None and not isinstance(raw_calls, list | tuple):
        raise MessageError("tool_calls", raw_calls, "a list or null")
    calls: list[ToolCall] = []
    for index, call in enumerate(raw_calls or ()):
        try:
            if not isinstance(call, dict):
                raise MessageError("", call, "a tool call (an object with a function)")
            kind = read_text_field(call, "type") or "function"
            # The body is under the call's type (`custom`), under `function`, or, in some variants, inline.
            name = kind if kind in call else "function" if "function" in call else ""
            if not name and "name" not in call:
                raise MessageError("function", None, "an object with name and arguments")
            body = call[name] if name else call
            calls.append(_read_function(body, read_text_field(call, "id"), kind, name))
        except MessageError as error:
            raise prefix_error(f"tool_calls[{index}]", error) from None
    if calls:
        return tuple(calls), _PLAIN
    legacy = raw.get("function_call")
    if legacy is not None:
        return (_read_function(legacy, "", "function", "function_call"),), _PLAIN
    if "tool_calls" not in raw:
        return (), _PLAIN
    return (), _NULL_CALLS if raw_calls is None else _EMPTY_CALLS


def _read_function(body: object, call_id: str, kind: str, field_path: str) -> ToolCall:
    try:
        if not isinstance(body, dict):
            raise MessageError("", body, "an object with name and arguments")
        name = body.get("name")
        if not isinstance(name, str) or not name:
            raise MessageError("name", name, "a non-empty string")
        arguments = body.get("arguments", body.get("input"))
        if arguments is None:
            arguments = ""
        elif not isinstance(arguments, str):
            arguments = _serialize_arguments(arguments)
        if not (name.isascii() and arguments.isascii()):
            name, arguments = replace_surrogates(name), replace_surrogates(arguments)
        return ToolCall(name, arguments, call_id, kind)
    except MessageError as error:
        raise prefix_error(field_path, error) from None


def _serialize_arguments(arguments: object) -> str:
    try:
        return json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise MessageError("arguments", type(arguments).__name__, "a string or a JSON value") from None


# -- writing -----------------------------------------------------------------------------------------


def write_message(message: Message) -> dict[str, Any]:
    """Returns a message in Chat Completions form."""
    raw: dict[str, Any] = {"role": message.role}
    if message.parts:
        raw["content"] = [write_part(part) for part in message.parts]
    else:
        raw["content"] = message.content
    if message.reasoning_content:
        raw["reasoning_content"] = message.reasoning_content
    if message.refusal:
        raw["refusal"] = message.refusal
    if message.tool_calls:
        raw["tool_calls"] = [_write_tool_call(call) for call in message.tool_calls]
    if message.name:
        raw["name"] = message.name
    if message.tool_call_id:
        raw["tool_call_id"] = message.tool_call_id
    return raw


def _write_tool_call(call: ToolCall) -> dict[str, Any]:
    body = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": body}


def write_part(part: str | Media) -> dict[str, Any]:
    """Returns a content part in Chat Completions form."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    source = part.url
    if not source:
        mime = part.mime.partition(",")[0].partition(";")[0] or "application/octet-stream"
        source = f"data:{mime};base64,{base64.b64encode(part.payload).decode()}"
    kind, name = f"{part.kind}_url", "url"
    if part.kind == "file":
        kind, name = "file", "file_id" if part.url else "file_data"
    body = {name: source, "detail": part.detail} if part.detail else {name: source}
    return {"type": kind, kind: body}
