"""Anthropic's Messages ⇄ canonical requests and answers; content blocks are in `messages_blocks`.

What is asked for and does not exist here (thinking budgets, context management, containers, tools that run on
Anthropic's servers) is accepted and counted as not applied.
`tool_choice: none` hides the tools; any other value shows them and leaves the choice to the model, as in Chat
Completions. An assistant message at the end is context, and the answer is a new message after it. A request
that continues a thread by a message's id gets an error that makes clients send the whole conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from branchline.chat.base import Codec
from branchline.core.call import Request, read_tools
from branchline.core.errors import MessageError
from branchline.core.message import ToolCall
from branchline.core.reader import prefix_error, read_text_field
from branchline.gateway.protocols.base import (
    ErrorInfo,
    ParsedRequest,
    RequestContext,
    WireProtocol,
    sse_event,
)
from branchline.gateway.protocols.messages_blocks import (
    Block,
    input_json,
    read_conversation,
    read_system,
    sign_thinking,
    tool_use_block,
    write_blocks,
)
from branchline.gateway.protocols.vendor_tools import anthropic_tool, warn_unsupported_tool
from branchline.runtime.answer import Answer, AnswerDelta
from branchline.runtime.call_record import CallRequest, CallResult
from branchline.runtime.request_fields import READ_FIELDS
from branchline.runtime.sampling import (
    JsonObject,
    explicit_sampling,
    merge_sampling,
    read_bool,
    read_sampling_params,
    read_strings,
)

_READ_FIELDS = READ_FIELDS["messages"]
_TOOL_CHOICE_TYPES = ("auto", "any", "tool", "none")
_TOOL_WISHES = frozenset({"strict", "defer_loading", "input_examples"})
"""Fields of a tool that no model here sees and no engine follows."""
_THREAD_FIELD = "thread.previous_message_id"


def read_request(body: object, context: RequestContext) -> ParsedRequest:
    """Reads a body; the session's own sampling overrides the client's."""
    options = context.managed.options
    fields = merge_sampling(
        {**body, **_chat_sampling_fields(body)} if isinstance(body, dict) else body, options
    )
    assert isinstance(body, dict)
    _reject_thread(fields.get("thread"))
    tool_choice, single_tool_call = _read_tool_choice(fields)
    tools, not_applied = _read_tools(None if tool_choice == "none" else fields.get("tools"))
    request = Request.read(
        {**fields, "tools": tools},
        agent=context.agent,
        messages=(*read_system(fields.get("system")), *read_conversation(fields.get("messages"))),
        retry_count=context.retry_count,
        spawned_by=context.spawned_by,
        sampling=explicit_sampling(fields, "max_tokens"),
    )
    # A session's sampling has `stop` in every protocol.
    has_stop = "stop" in options.sampling or "stop_sequences" not in fields
    call_request = CallRequest(
        request,
        read_sampling_params(fields, "max_tokens", context.default_max_tokens, context.max_tokens_limit),
        stream=read_bool(fields, "stream"),
        stop=read_strings(fields, "stop" if has_stop else "stop_sequences"),
        single_tool_call=single_tool_call,
        tool_choice=tool_choice,
        not_applied=tuple(sorted(not_applied)),
        other_fields={name: body[name] for name in body.keys() - _READ_FIELDS if body[name] is not None},
        upstream_fields=_upstream_fields(body),
    )
    return ParsedRequest(call_request, context.model)


def _chat_sampling_fields(body: JsonObject) -> dict[str, Any]:
    """The format of the answer, under the name of Chat Completions."""
    config = body.get("output_config")
    format = config.get("format") if isinstance(config, dict) else None
    path = "output_config.format" if format is not None else "output_format"
    format = body.get("output_format") if format is None else format
    match format:
        case None:
            return {}
        case {"type": "json_schema", "schema": dict(schema)}:
            return {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": schema},
                }
            }
    raise MessageError(path, format, "a json_schema with a schema")


def _upstream_fields(body: JsonObject) -> dict[str, Any]:
    """What an upstream can follow, under the names of Chat Completions. Its `user` is `metadata.user_id`."""
    config, metadata = body.get("output_config"), body.get("metadata")
    fields: dict[str, Any] = {}
    if isinstance(config, dict) and config.get("effort") is not None:
        fields["reasoning_effort"] = config["effort"]
    if isinstance(metadata, dict):
        labels = {name: value for name, value in metadata.items() if name != "user_id" and value is not None}
        fields |= {"metadata": labels} if labels else {}
        fields |= {"user": metadata["user_id"]} if metadata.get("user_id") is not None else {}
    return fields


def _reject_thread(thread: object) -> None:
    """Refuses a continued thread: ignoring it would show the model only the end of the conversation."""
    if isinstance(thread, dict) and thread.get("type") == "continue":
        raise MessageError(
            _THREAD_FIELD, thread.get("previous_message_id"), "nothing: send the whole conversation"
        )


def _read_tool_choice(fields: JsonObject) -> tuple[object, bool]:
    """The `tool_choice` of Chat Completions, and whether an answer may have only one tool call."""
    choice = fields.get("tool_choice", {"type": "auto"})
    if not isinstance(choice, dict):
        raise MessageError("tool_choice", choice, "an object with a type")
    if choice.get("type") not in _TOOL_CHOICE_TYPES:
        raise MessageError("tool_choice.type", choice.get("type"), "one of " + ", ".join(_TOOL_CHOICE_TYPES))
    choice_fields = {name: value for name, value in choice.items() if value is not None}
    try:
        single_call = read_bool(choice_fields, "disable_parallel_tool_use")
        if choice["type"] == "tool":
            name = read_text_field(choice_fields, "name")
            return {"type": "function", "function": {"name": name}}, single_call
    except MessageError as error:
        raise prefix_error("tool_choice", error) from None
    return {"auto": None, "any": "required", "none": "none"}[choice["type"]], single_call


def _read_tools(raw: object) -> tuple[list[dict[str, Any]] | None, set[str]]:
    """Tools as Chat Completions functions, and what is asked of tools that nobody does.

    Anthropic's own tools have a type and no schema: those that the client runs get their schema here, those
    that run on Anthropic's servers are left out.
    """
    not_applied: set[str] = set()
    if raw is None:
        return None, not_applied
    tools = []
    for index, tool in enumerate(read_tools(raw)):
        kind = tool.get("type")
        is_vendor = kind not in (None, "custom") and "input_schema" not in tool
        vendor = anthropic_tool(str(kind)) if is_vendor else None
        try:
            if vendor is not None:
                name = read_text_field(tool, "name") or str(kind).rpartition("_")[0]
                tools.append(vendor.to_function(name))
            elif is_vendor:
                warn_unsupported_tool(str(kind))
                not_applied.add(f"tools.{kind}")
            else:
                tools.append(_read_tool(tool))
            not_applied |= {f"tools.{name}" for name in tool if name in _TOOL_WISHES and tool[name]}
        except MessageError as error:
            raise prefix_error(f"tools[{index}]", error) from None
    return tools, not_applied


def _read_tool(tool: JsonObject) -> dict[str, Any]:
    name, schema = read_text_field(tool, "name"), tool.get("input_schema")
    if not name:
        raise MessageError("name", tool.get("name"), "a non-empty string")
    if not isinstance(schema, dict):
        raise MessageError("input_schema", schema, "a JSON schema (an object)")
    description = read_text_field(tool, "description")
    function = {"name": name, "description": description} if description else {"name": name}
    return {"type": "function", "function": {**function, "parameters": schema}}


# -- answers -----------------------------------------------------------------------------------------

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def build_response(parsed: ParsedRequest, result: CallResult, _codec: Codec) -> dict[str, Any]:
    answer = result.answers[0]
    blocks = write_blocks(answer.message, result.call_id)
    return {**_message_fields(parsed, result.call_id, blocks, usage(result)), **_stop_fields(answer)}


def _message_fields(
    parsed: ParsedRequest, call_id: str, content: list[Block], usage: dict[str, int]
) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "message",
        "role": "assistant",
        "model": parsed.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _stop_fields(answer: Answer) -> dict[str, Any]:
    if answer.finish_reason == "stop" and answer.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_sequence}
    if answer.message.refusal:
        return {"stop_reason": "refusal", "stop_sequence": None}
    return {"stop_reason": _STOP_REASONS.get(answer.finish_reason, "end_turn"), "stop_sequence": None}


def usage(result: CallResult) -> dict[str, int]:
    """Reused tokens count as cache reads: the three input counts add up to the prompt."""
    counted = result.upstream_usage
    reused = (
        result.reused_tokens if counted is None else min(counted.cached_tokens or 0, result.prompt_tokens)
    )
    return _usage_fields(result.prompt_tokens - reused, reused, result.sampled_tokens)


def _usage_fields(fresh: int = 0, reused: int = 0, sampled: int = 0) -> dict[str, int]:
    return {
        "input_tokens": fresh,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reused,
        "output_tokens": sampled,
    }


def model_list(names: Sequence[str]) -> dict[str, Any]:
    models = [
        {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        for name in names
    ]
    return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def count_response(tokens: int) -> dict[str, Any]:
    """The response to `count_tokens`."""
    return {"input_tokens": tokens}


@dataclass
class MessagesStream:
    """The events of a streamed response: blocks in sequence, at most one of them open.

    The size of the prompt is known only at the end: `message_start` has zeros, `message_delta` the counts.
    """

    parsed: ParsedRequest
    call_id: str
    codec: Codec
    _has_started: bool = False
    _index: int = 0
    """The index of the open block, or of the next one."""
    _open_block: str = ""
    """`thinking` or `text` while such a block is open."""
    _thinking_parts: list[str] = field(default_factory=list)

    def encode_delta(self, delta: AnswerDelta) -> bytes:
        events = self._start_message()
        for part in delta.deltas:
            if part.tool_call is not None:
                events += self._tool_use_events(part.tool_call)
            elif part.reasoning_content:
                self._thinking_parts.append(part.reasoning_content)
                events += self._text_events("thinking", part.reasoning_content)
            elif part.content:
                events += self._text_events("text", part.content)
        return b"".join(events)

    def encode_end(self, result: CallResult) -> bytes:
        events = self._start_message()
        if refusal := result.answers[0].message.refusal:
            events += self._text_events("text", refusal)
        events += self._close_block()
        events.append(_event("message_delta", delta=_stop_fields(result.answers[0]), usage=usage(result)))
        return b"".join([*events, _event("message_stop")])

    def encode_ping(self) -> bytes:
        return b"".join([*self._start_message(), _event("ping")])

    def encode_error(self, info: ErrorInfo) -> bytes:
        return sse_event({**error_body(info), "request_id": self.call_id}, "error")

    def _start_message(self) -> list[bytes]:
        if self._has_started:
            return []
        self._has_started = True
        message = _message_fields(self.parsed, self.call_id, [], _usage_fields())
        return [_event("message_start", message=message)]

    def _text_events(self, kind: str, text: str) -> list[bytes]:
        """A delta in a block of this kind, which is also its field's name; opens the block if needed."""
        events: list[bytes] = []
        if self._open_block != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events += [*self._close_block(), self._block_start({"type": kind, kind: "", **signature})]
            self._open_block = kind
        return [*events, self._block_delta(f"{kind}_delta", kind, text)]

    def _tool_use_events(self, call: ToolCall) -> list[bytes]:
        events = [*self._close_block(), self._block_start(tool_use_block(call))]
        events.append(self._block_delta("input_json_delta", "partial_json", input_json(call)))
        return [*events, self._block_stop()]

    def _close_block(self) -> list[bytes]:
        if not self._open_block:
            return []
        events: list[bytes] = []
        if self._open_block == "thinking":
            signature = sign_thinking(self.call_id, "".join(self._thinking_parts))
            events.append(self._block_delta("signature_delta", "signature", signature))
            self._thinking_parts.clear()
        self._open_block = ""
        return [*events, self._block_stop()]

    def _block_start(self, block: Block) -> bytes:
        return _event("content_block_start", index=self._index, content_block=block)

    def _block_delta(self, kind: str, name: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, name: text})

    def _block_stop(self) -> bytes:
        self._index += 1
        return _event("content_block_stop", index=self._index - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return sse_event({"type": kind, **fields}, kind)


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def error_body(info: ErrorInfo) -> dict[str, Any]:
    """Anthropic's error envelope; it has no place for the field, which is in the message."""
    kind = _ERROR_TYPES.get(info.status, "invalid_request_error" if info.status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": info.message}
    # With this code, clients of a thread send the whole conversation.
    code = "thread_not_found" if info.param == _THREAD_FIELD else info.code
    if code is not None:
        error["details"] = {"error_code": code}
    return {"type": "error", "error": error, "request_id": None}


MESSAGES = WireProtocol(
    "messages",
    "msg_",
    read_request,
    build_response,
    MessagesStream,
    error_body,
    count_response=count_response,
    request_id_header=b"request-id",
)
