"""Joins a logged stream into the response that the server would have sent without streaming.

A stream is a list of chat completion chunks, or the text of its server-sent events. Token ids and logprobs
are joined per choice as vLLM streams them; chunks of several choices may alternate. A choice without a finish
reason was cut off: its finish reason becomes `cancelled`. If the ids of a stream are not complete, the line
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from branchline.core.errors import MessageError
from branchline.core.reader import REASONING_TEXT_FIELDS, decode_json_keeping_surrogates

_TEXT_FIELDS = ("content", "refusal", *REASONING_TEXT_FIELDS)
_END_OF_STREAM = "[DONE]"
TRUNCATED = "cancelled"
"""The finish reason of a choice whose stream has none."""


def join_stream(raw: Sequence[object] | str) -> dict[str, Any]:
    """Returns the response of a stream; raises MessageError with the position of a chunk that is none.

    >>> chunks = [{"choices": [{"delta": {"content": "a"}}]}, {"choices": [{"delta": {"content": "b"}}]}]
    >>> join_stream(chunks)["choices"]
    [{'index': 0, 'message': {'role': 'assistant', 'content': 'ab'}, 'finish_reason': 'cancelled'}]
    """
    chunks = _read_events(raw) if isinstance(raw, str) else raw
    response: dict[str, Any] = {}
    choices: dict[int, _Choice] = {}
    for position, chunk in enumerate(chunks):
        path = f"response[{position}]"
        if not isinstance(chunk, dict):
            raise MessageError(path, chunk, "a chunk of a chat completion (an object with choices)")
        if chunk.get("error"):
            if not choices:
                raise MessageError(f"{path}.error", chunk["error"], "a chunk of a chat completion")
            break  # The rest of the answer was never sent.
        if "choices" not in chunk and "usage" not in chunk:
            raise MessageError(path, chunk, "a chunk of a chat completion (an object with choices)")
        for name in ("id", "model", "prompt_token_ids"):
            _keep_equal(response, name, chunk.get(name), path)
        if chunk.get("usage"):
            response["usage"] = chunk["usage"]
        entries = chunk.get("choices") or []
        if not isinstance(entries, list):
            raise MessageError(f"{path}.choices", entries, "a list")
        for index, entry in enumerate(entries):
            _add_entry(choices, entry, f"{path}.choices[{index}]", index)
    response["choices"] = [{"index": index, **choices[index].to_json()} for index in sorted(choices)]
    return response


def _read_events(raw: str) -> list[object]:
    """Returns the JSON values of server-sent events. An event that is cut off ends the stream."""
    blocks = raw.replace("\r\n", "\n").replace("\r", "\n").split("\n\n")
    data = ["\n".join(_event_data(block)) for block in blocks]
    data = [text for text in data if text.strip()]
    if _END_OF_STREAM in data:
        data = data[: data.index(_END_OF_STREAM)]
    events: list[object] = []
    for number, text in enumerate(data):
        try:
            events.append(decode_json_keeping_surrogates(text.encode("utf-8", "surrogatepass")))
        except ValueError:
            if number < len(data) - 1 or not events:
                raise MessageError(f"response: event {number}", text, "JSON") from None
    if not events:
        raise MessageError("response", raw, "an object, a list of chunks, or server-sent events with data")
    return events


def _event_data(block: str) -> list[str]:
    lines = [line for line in block.split("\n") if line.startswith("data:")]
    return [line.removeprefix("data:").removeprefix(" ") for line in lines]


@dataclass
class _ToolCall:
    id: str = ""
    type: str = "function"
    name: str = ""
    arguments: str = ""

    def to_json(self) -> dict[str, Any]:
        body = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": self.type, self.type: body}


@dataclass
class _Choice:
    """The parts of one choice that have arrived."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    tool_calls: dict[int, _ToolCall] = field(default_factory=dict)
    function: _ToolCall | None = None
    ids: list[object] | None = None
    ids_are_missing: str = ""
    """The path of a chunk with text and without ids."""
    logprobs: list[object] | None = None
    unmeasured: int = 0
    """Ids before the first logprobs."""
    shared: dict[str, Any] = field(default_factory=dict)
    """The finish reason and the ids of the prompt, which may stand in several chunks."""

    @property
    def finish_reason(self) -> object:
        return self.shared.get("finish_reason")

    def add(self, entry: Mapping[str, Any], path: str) -> None:
        delta = entry.get("delta")
        if delta is None:
            delta = {}
        if not isinstance(delta, dict):
            raise MessageError(f"{path}.delta", delta, "an object")
        has_text = False
        for name in _TEXT_FIELDS:
            text = delta.get(name)
            if text is None:
                continue
            if not isinstance(text, str):
                raise MessageError(f"{path}.delta.{name}", text, "a string or null")
            self.texts.setdefault(name, []).append(text)
            has_text = has_text or bool(text)
        has_text = self._add_tool_calls(delta, f"{path}.delta") or has_text
        if self.finish_reason is not None and (has_text or entry.get("token_ids")):
            raise MessageError(
                path, "text or token_ids", f"none after the finish reason {self.finish_reason!r}"
            )
        self._add_tokens(entry, path, has_text)
        for name in ("finish_reason", "prompt_token_ids"):
            _keep_equal(self.shared, name, entry.get(name), path)

    def _add_tool_calls(self, delta: Mapping[str, Any], path: str) -> bool:
        parts = delta.get("tool_calls") or []
        if not isinstance(parts, list):
            raise MessageError(f"{path}.tool_calls", parts, "a list or null")
        for position, part in enumerate(parts):
            part_path = f"{path}.tool_calls[{position}]"
            if not isinstance(part, dict):
                raise MessageError(part_path, part, "a part of a tool call (an object)")
            index = part.get("index")
            if index is None:
                # Without an index, a part with a name begins a call.
                body = part.get("function")
                begins = isinstance(body, dict) and bool(body.get("name"))
                index = max(self.tool_calls, default=-1) + (begins or not self.tool_calls)
            if not isinstance(index, int) or isinstance(index, bool):
                raise MessageError(f"{part_path}.index", index, "an integer")
            call = self.tool_calls.setdefault(index, _ToolCall())
            call.id = call.id or _text(part, "id", part_path)
            call.type = _text(part, "type", part_path) or call.type
            _add_function(call, part.get("function"), f"{part_path}.function")
        legacy = delta.get("function_call")
        if legacy is not None:
            self.function = self.function or _ToolCall()
            _add_function(self.function, legacy, f"{path}.function_call")
        return bool(parts) or legacy is not None

    def _add_tokens(self, entry: Mapping[str, Any], path: str, has_text: bool) -> None:
        ids, logprobs = entry.get("token_ids"), entry.get("logprobs")
        if ids is not None and not isinstance(ids, list):
            raise MessageError(f"{path}.token_ids", ids, "a list of token ids")
        entries = logprobs.get("content") if isinstance(logprobs, dict) else logprobs
        if entries is not None and not isinstance(entries, list):
            raise MessageError(f"{path}.logprobs.content", entries, "a list with one entry per token")
        if ids is None and (has_text or entries):
            self.ids_are_missing = self.ids_are_missing or path
        if entries is not None:
            if self.logprobs is None:
                self.logprobs = [{"logprob": None}] * self.unmeasured
            self.logprobs += entries
        elif ids and self.logprobs is not None:
            self.logprobs += [{"logprob": None}] * len(ids)
        elif ids:
            self.unmeasured += len(ids)
        if ids is not None:
            self.ids = (self.ids or []) + ids
        if self.ids and self.ids_are_missing:
            raise MessageError(f"{self.ids_are_missing}.token_ids", None, "ids, as other chunks of it have")

    def to_json(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for name, parts in self.texts.items():
            message[name] = "".join(parts)
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    call.type: {"name": call.name, "arguments": call.arguments},
                }
                for _, call in sorted(self.tool_calls.items())
            ]
        if self.function is not None:
            message["function_call"] = {"name": self.function.name, "arguments": self.function.arguments}
        choice: dict[str, Any] = {"message": message, "finish_reason": TRUNCATED, **self.shared}
        if self.ids is not None:
            choice["token_ids"] = self.ids
        if self.logprobs is not None:
            choice["logprobs"] = {"content": self.logprobs}
        return choice


def _add_entry(choices: dict[int, _Choice], entry: object, path: str, position: int) -> None:
    if not isinstance(entry, dict):
        raise MessageError(path, entry, "a choice (an object with a delta)")
    if "delta" not in entry and "message" in entry:
        raise MessageError(path, "a message", "a delta; a complete response is no list")
    index = entry.get("index", position)
    if not isinstance(index, int) or isinstance(index, bool):
        raise MessageError(f"{path}.index", index, "an integer")
    choices.setdefault(index, _Choice()).add(entry, path)


def _add_function(call: _ToolCall, body: object, path: str) -> None:
    if body is None:
        return
    if not isinstance(body, dict):
        raise MessageError(path, body, "an object with name and arguments")
    name, arguments = _text(body, "name", path), body.get("arguments")
    # Most servers send the name once, some with every part.
    call.name += name if name != call.name else ""
    if arguments is not None:
        call.arguments += arguments if isinstance(arguments, str) else json.dumps(arguments)


def _text(raw: Mapping[str, Any], name: str, path: str) -> str:
    value = raw.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MessageError(f"{path}.{name}", value, "a string or null")
    return value


def _keep_equal(values: dict[str, Any], name: str, value: object, path: str) -> None:
    """Keeps a value that all chunks of a response share; null and an empty text say nothing."""
    if value in (None, ""):
        return
    if values.setdefault(name, value) != value:
        raise MessageError(f"{path}.{name}", value, f"{values[name]!r}, as in the chunks before it")
