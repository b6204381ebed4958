"""Anthropic's Messages, wire ⇄ canonical, and nothing else; blocks are in `messages_blocks`.

Whatever asks for something we do not have (cache_control, betas, thinking budgets, context management,
output configuration, service tiers, containers, tools that run on Anthropic's servers) is passed over.
`tool_choice` none hides the tools; any other shows them and leaves the choice to the model, as in Chat
Completions. An assistant's message at the end is context, and the answer a new message behind it. Who goes
on from a message by its id (`thread`) is told that it is not here, and sends the whole conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from branchline.chat.base import Codec
from branchline.core.call import Request, read_tools
from branchline.core.errors import MessageError
from branchline.core.message import ToolCall
from branchline.core.reader import prefix_error, read_text_field
from branchline.gateway.protocols.base import (
    ParsedRequest,
    RequestContext,
    WireProtocol,
    read_model_name,
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
from branchline.runtime.sampling import (
    JsonObject,
    explicit_sampling,
    merge_sampling,
    read_bool,
    read_sampling_params,
    read_strings,
)

_TOOL_CHOICE_TYPES = ("auto", "any", "tool", "none")
_THREAD_FIELD = "thread.previous_message_id"


def read_request(body: object, caller: RequestContext) -> ParsedRequest:
    """A request's body; the session's own sampling goes before the client's."""
    given = merge_sampling(body, caller.managed.options)
    _reject_thread(given.get("thread"))
    choice, single_call = _read_tool_choice(given)
    request = Request.read(
        {**given, "tools": None if choice == "none" else _read_tools(given.get("tools"))},
        agent=caller.agent,
        messages=(*read_system(given.get("system")), *read_conversation(given.get("messages"))),
    )
    request = replace(
        request,
        retry_count=caller.retry,
        spawned_by=caller.spawned_by,
        sampling=explicit_sampling(given, "max_tokens"),
    )
    # A session says `stop`, whatever the protocol.
    says_stop = "stop" in caller.managed.options.sampling or "stop_sequences" not in given
    asked = CallRequest(
        request,
        read_sampling_params(
            given,
            "max_tokens",
            default_max_tokens=caller.default_max_tokens,
            max_tokens_limit=caller.max_tokens_limit,
        ),
        stop=read_strings(given, "stop" if says_stop else "stop_sequences"),
        single_tool_call=single_call,
        tool_choice=choice,
        stream=read_bool(given, "stream"),
    )
    return ParsedRequest(asked, read_model_name(given))


def _reject_thread(thread: object) -> None:
    """Passed over, it would leave the model with the end of a conversation. A thread that begins is whole."""
    if isinstance(thread, dict) and thread.get("type") == "continue":
        raise MessageError(
            _THREAD_FIELD, thread.get("previous_message_id"), "nothing: send the whole conversation"
        )


def _read_tool_choice(given: JsonObject) -> tuple[object, bool]:
    """Which tool to call, as Chat Completions say it, and whether one call is enough."""
    choice = given.get("tool_choice", {"type": "auto"})
    if not isinstance(choice, dict):
        raise MessageError("tool_choice", choice, "an object with a type")
    if choice.get("type") not in _TOOL_CHOICE_TYPES:
        raise MessageError("tool_choice.type", choice.get("type"), "one of " + ", ".join(_TOOL_CHOICE_TYPES))
    alone = {name: value for name, value in choice.items() if value is not None}
    try:
        single_call = read_bool(alone, "disable_parallel_tool_use")
        if choice["type"] == "tool":
            return {"type": "function", "function": {"name": read_text_field(alone, "name")}}, single_call
    except MessageError as error:
        raise prefix_error("tool_choice", error) from None
    return {"auto": None, "any": "required", "none": "none"}[choice["type"]], single_call


def _read_tools(raw: object) -> list[dict[str, Any]] | None:
    """Tools in the shape of Chat Completions. Anthropic's own have a type and no schema: those that a client
    runs are shown, those that run at Anthropic's are passed over."""
    if raw is None:
        return None
    tools = []
    for index, tool in enumerate(read_tools(raw)):
        kind = tool.get("type")
        is_own = kind not in (None, "custom") and "input_schema" not in tool
        vendor = anthropic_tool(str(kind)) if is_own else None
        try:
            if vendor is not None:
                tools.append(
                    vendor.to_function(read_text_field(tool, "name") or str(kind).rpartition("_")[0])
                )
            elif is_own:
                warn_unsupported_tool(str(kind))
            else:
                tools.append(_read_tool(tool))
        except MessageError as error:
            raise prefix_error(f"tools[{index}]", error) from None
    return tools


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


def build_response(ask: ParsedRequest, done: CallResult, _codec: Codec) -> dict[str, Any]:
    """The whole response."""
    answer = done.answers[0]
    message = _message_fields(ask, done.call_id, write_blocks(answer.message, done.call_id), usage(done))
    return {**message, **_stop_fields(answer)}


def _message_fields(
    ask: ParsedRequest, call_id: str, content: list[Block], spent: dict[str, int]
) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": spent,
    }


def _stop_fields(answer: Answer) -> dict[str, Any]:
    if answer.finish_reason == "stop" and answer.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_sequence}
    if answer.message.refusal:
        return {"stop_reason": "refusal", "stop_sequence": None}
    return {"stop_reason": _STOP_REASONS.get(answer.finish_reason, "end_turn"), "stop_sequence": None}


def usage(done: CallResult) -> dict[str, int]:
    """What was reused is told apart: the three input counts add up to the prompt."""
    reused = done.reused_tokens
    return _usage_fields(done.prompt_tokens - reused, reused, done.sampled_tokens)


def _usage_fields(fresh: int = 0, reused: int = 0, sampled: int = 0) -> dict[str, int]:
    return {
        "input_tokens": fresh,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reused,
        "output_tokens": sampled,
    }


def model_list(names: Sequence[str]) -> dict[str, Any]:
    """The models that there are."""
    told = [
        {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        for name in names
    ]
    return {"data": told, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def count_response(tokens: int) -> dict[str, Any]:
    """The answer to `count_tokens`."""
    return {"input_tokens": tokens}


@dataclass
class MessagesStream:
    """The events of a streamed response: blocks one behind the other, of which one at most is open.

    The prompt's size is known only at the end, so `message_start` counts nothing and `message_delta` all.
    """

    request: ParsedRequest
    call_id: str
    codec: Codec
    _has_started: bool = False
    _index: int = 0
    """The block that is open, or the next one."""
    _open_block: str = ""
    """`thinking` or `text` while such a block is open."""
    _thinking_parts: list[str] = field(default_factory=list)

    def encode_delta(self, said: AnswerDelta) -> bytes:
        events = self._start_message()
        for delta in said.deltas:
            if delta.tool_call is not None:
                events += self._tool_use_events(delta.tool_call)
            elif delta.reasoning_content:
                self._thinking_parts.append(delta.reasoning_content)
                events += self._text_events("thinking", delta.reasoning_content)
            elif delta.content:
                events += self._text_events("text", delta.content)
        return b"".join(events)

    def encode_end(self, done: CallResult) -> bytes:
        events = self._start_message()
        if refusal := done.answers[0].message.refusal:
            events += self._text_events("text", refusal)
        events += self._close_block()
        events.append(_event("message_delta", delta=_stop_fields(done.answers[0]), usage=usage(done)))
        return b"".join([*events, _event("message_stop")])

    def encode_ping(self) -> bytes:
        return b"".join([*self._start_message(), _event("ping")])

    def encode_error(self, status: int, message: str, field_name: str | None, code: str | None) -> bytes:
        return sse_event(
            {**error_body(status, message, field_name, code), "request_id": self.call_id}, "error"
        )

    def _start_message(self) -> list[bytes]:
        if self._has_started:
            return []
        self._has_started = True
        return [
            _event("message_start", message=_message_fields(self.request, self.call_id, [], _usage_fields()))
        ]

    def _text_events(self, kind: str, text: str) -> list[bytes]:
        """More of what is being said, in a block of its kind. A block's kind is also its field's name."""
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
}


def error_body(
    status: int, message: str, field_name: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The envelope of this protocol's errors; its words name the field, for it has no other place."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    problem: dict[str, Any] = {"type": kind, "message": message}
    # A thread is sent again, whole, by clients that are told this.
    code = "thread_not_found" if field_name == _THREAD_FIELD else code
    if code is not None:
        problem["details"] = {"error_code": code}
    return {"type": "error", "error": problem, "request_id": None}


MESSAGES = WireProtocol(
    "messages",
    "msg_",
    read_request,
    build_response,
    MessagesStream,
    error_body,
    request_id_header=b"request-id",
)
MESSAGES_COUNT_TOKENS = replace(MESSAGES, count_response=count_response)
"""The same request, of which only the size of its prompt is wanted."""
