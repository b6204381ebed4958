"""Chat Completions, wire ⇄ canonical, and nothing else.

`tool_choice: none` hides the tools from the model. `required`, `auto` or a named tool show them and leave
the choice to the model: forcing a call would sample what its template never writes. Tools of other kinds
than functions are in `chat_tools`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from branchline.chat.base import Codec
from branchline.core.call import Request
from branchline.core.errors import MessageError
from branchline.core.message import Message
from branchline.core.reader import decode_json, read_messages
from branchline.core.token_arrays import Floats, Ids
from branchline.gateway.protocols.base import (
    MAX_CHOICES,
    CompletionRequest,
    RequestContext,
    WireProtocol,
    encode_single_line,
    read_include_usage,
    read_model_name,
    sse_event,
)
from branchline.gateway.protocols.chat_tools import (
    ToolSet,
    read_chat_message,
    read_tool_set,
    restore_arguments,
)
from branchline.gateway.protocols.logprobs import logprob_entries
from branchline.gateway.protocols.openai_tools import is_client_tool, translate_tool_choice
from branchline.gateway.request_bodies import BodyReader
from branchline.runtime.answer import Answer, AnswerDelta
from branchline.runtime.call_record import CallRequest, CallResult
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.sampling import (
    SAMPLING_FIELDS,
    JsonObject,
    explicit_sampling,
    merge_sampling,
    read_bool,
    read_int,
    read_sampling_params,
    read_strings,
)

_OVERRIDDEN_FIELDS = frozenset(
    {"model", "messages", "functions", "stream", "stream_options", "return_token_ids"}
)
"""Fields that an upstream gets from the gateway and not from the client."""


@dataclass(frozen=True)
class ChatRequest(CompletionRequest):
    """A request, read."""

    tool_set: ToolSet = field(default_factory=ToolSet)


def read_request(body: object, caller: RequestContext) -> ChatRequest:
    """A request's body; the session's own sampling goes before the client's."""
    given = merge_sampling(body, caller.managed.options)
    assert isinstance(body, dict)
    # The session's own limit goes before the client's, whichever of the two names the client uses.
    is_newer = "max_completion_tokens" in given and "max_tokens" not in caller.managed.options.sampling
    max_tokens = "max_completion_tokens" if is_newer else "max_tokens"
    offer = read_tool_set(body, given, caller.managed.message_cache)
    request = Request.read(
        body,
        agent=caller.agent,
        messages=_read_messages(body.get("messages"), caller, offer),
        tools=offer.tools,
        retry_count=caller.retry,
        spawned_by=caller.spawned_by,
        sampling=explicit_sampling(given, max_tokens),
    )
    return ChatRequest(
        CallRequest(
            request,
            read_sampling_params(
                given,
                max_tokens,
                default_max_tokens=caller.default_max_tokens,
                max_tokens_limit=caller.max_tokens_limit,
            ),
            stop=read_strings(given, "stop"),
            n=read_int(given, "n", 1, 1, MAX_CHOICES),
            single_tool_call=offer.is_legacy or not read_bool(given, "parallel_tool_calls", True),
            stream=read_bool(given, "stream"),
        ),
        read_model_name(given),
        include_usage=read_include_usage(given),
        logprobs=read_bool(given, "logprobs"),
        top_logprobs=read_int(given, "top_logprobs", 0, 0, 2**31) > 0,
        return_token_ids=read_bool(given, "return_token_ids"),
        tool_set=offer,
    )


def _read_messages(given: object, caller: RequestContext, offer: ToolSet) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        return read_messages(given)
    messages = caller.managed.message_cache.read_items(given, read_chat_message)
    if offer.aliases:
        messages = [restore_arguments(message, caller.managed.session.tree) for message in messages]
    return tuple(messages)


def upstream_options(body: bytes, session: SessionOptions, tools: Sequence[JsonObject]) -> dict[str, Any]:
    """All fields of a body for an upstream of the same protocol, also those that are not read here.

    The session's sampling is merged in. `tools` has only those that the upstream runs itself.
    """
    try:
        fields = decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # In a field that was not decoded before.
        raise MessageError("body", body[:60], f"JSON ({error})") from error
    given = {
        name: value for name, value in fields.items() if value is not None and name not in _OVERRIDDEN_FIELDS
    }
    options = {**session.sampling_defaults, **given, **session.sampling}
    if "max_completion_tokens" in options:
        # Two names of one limit: the session's own has precedence, then the newer name.
        options.pop("max_completion_tokens" if "max_tokens" in session.sampling else "max_tokens", None)
    options.pop("n", None)
    choice = options.pop("function_call", None)
    if isinstance(choice, dict):
        options["tool_choice"] = {"type": "function", "function": choice}
    if "tools" in options:
        options["tools"] = [tool for tool in options["tools"] if not is_client_tool(tool)]
    if "tool_choice" in options:
        options["tool_choice"] = translate_tool_choice(options["tool_choice"], tools)
    return options


# -- answers -----------------------------------------------------------------------------------------


def build_response(ask: ChatRequest, done: CallResult, codec: Codec) -> dict[str, Any]:
    """The whole response."""
    response = {
        "id": done.call_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [_choice(ask, index, answer, codec) for index, answer in enumerate(done.answers)],
        "usage": usage(done),
    }
    if ask.return_token_ids:
        response["prompt_token_ids"] = done.prompt_ids.tolist()
    return response


def _choice(ask: ChatRequest, index: int, answer: Answer, codec: Codec) -> dict[str, Any]:
    said = answer.message
    message: dict[str, Any] = {"role": "assistant", "content": said.content or None}
    if not (said.tool_calls or said.refusal) and said.content == "":
        message["content"] = ""
    if said.refusal:
        message["refusal"] = said.refusal
    if said.reasoning_content:
        message["reasoning_content"] = said.reasoning_content
    if said.tool_calls:
        message |= ask.tool_set.to_wire(said.tool_calls)
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "finish_reason": ask.tool_set.finish_reason(answer.finish_reason),
    }
    choice["logprobs"] = _logprobs(ask, answer.ids, answer.logprobs, codec) if ask.logprobs else None
    if ask.return_token_ids:
        choice["token_ids"] = answer.ids.tolist()
    return choice


def usage(done: CallResult) -> dict[str, int]:
    prompt, sampled = done.prompt_tokens, done.sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(
    ask: CompletionRequest, ids: Ids, logprobs: Floats | None, codec: Codec
) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {
        "content": logprob_entries(ids, logprobs, codec, with_top_logprobs=ask.top_logprobs),
        "refusal": None,
    }


def model_list(names: Sequence[str]) -> dict[str, Any]:
    """The models that there are."""
    told = [{"id": name, "object": "model", "created": 0, "owned_by": "branchline"} for name in names]
    return {"object": "list", "data": told}


def count_response(tokens: int) -> dict[str, Any]:
    """The answer to `count_tokens`, under the name it has in a response's usage."""
    return {"prompt_tokens": tokens}


@dataclass
class ChatStream:
    """The events of a streamed response; the finish leaves with `end`."""

    request: ChatRequest
    call_id: str
    codec: Codec
    created: int = field(default_factory=lambda: int(time.time()))
    _started_choices: set[int] = field(default_factory=set)
    _text_chunk_templates: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """What stands around a text in the events of a choice that has begun."""

    def encode_delta(self, said: AnswerDelta) -> bytes:
        """What one bit of an answer becomes."""
        frame = self._text_chunk_templates.get(said.index)
        if frame is not None and len(said.deltas) == 1 and (text := said.deltas[0].content):
            # Mostly: a token of text, and nothing else to say of it.
            return frame[0] + encode_single_line(text) + frame[1]
        if frame is None and not (self.request.logprobs or self.request.return_token_ids):
            before, _, behind = sse_event(self._chunk(said.index, {"content": ""}, None, {})).rpartition(
                b'""'
            )
            self._text_chunk_templates[said.index] = before, behind
        return b"".join([sse_event(chunk) for chunk in self._delta_chunks(said)])

    def encode_end(self, done: CallResult) -> bytes:
        """The finish of each choice, then the usage where it was asked for."""
        return b"".join([*(sse_event(chunk) for chunk in self._end_chunks(done)), b"data: [DONE]\n\n"])

    def encode_ping(self) -> bytes:
        """A chunk with nothing in it."""
        return sse_event(self._chunk(0, self._first_delta(0), None, {}))

    def encode_error(self, status: int, message: str, field_name: str | None, code: str | None) -> bytes:
        return sse_event({**error_body(status, message, field_name, code), "status": status})

    def _first_delta(self, choice: int) -> dict[str, Any]:
        """What the first chunk of a choice says."""
        if choice in self._started_choices:
            return {}
        self._started_choices.add(choice)
        return {"role": "assistant", "content": ""}

    def _delta_chunks(self, said: AnswerDelta) -> Iterator[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if said.index not in self._started_choices:
            deltas.append(self._first_delta(said.index))
        for delta in said.deltas:
            if delta.tool_call is not None:
                deltas.append(self.request.tool_set.to_wire([delta.tool_call], delta.index))
            elif delta.reasoning_content:
                deltas.append({"reasoning_content": delta.reasoning_content})
            elif delta.content:
                deltas.append({"content": delta.content})
        extra: dict[str, Any] = {}
        if self.request.logprobs:
            extra["logprobs"] = _logprobs(self.request, said.ids, said.logprobs, self.codec)
        if self.request.return_token_ids:
            extra["token_ids"] = said.ids.tolist()
        if not deltas and extra and len(said.ids):
            deltas.append({})
        for place, content in enumerate(deltas):
            # Tokens go with the last delta they made, so that each is told once.
            yield self._chunk(said.index, content, None, extra if place == len(deltas) - 1 else {})

    def _end_chunks(self, done: CallResult) -> Iterator[dict[str, Any]]:
        for index, answer in enumerate(done.answers):
            extra: dict[str, Any] = {}
            if self.request.return_token_ids and index == 0:
                extra["prompt_token_ids"] = done.prompt_ids.tolist()
            if answer.message.refusal:
                yield self._chunk(
                    index, {**self._first_delta(index), "refusal": answer.message.refusal}, None, {}
                )
            yield self._chunk(
                index,
                self._first_delta(index),
                self.request.tool_set.finish_reason(answer.finish_reason),
                {},
                extra,
            )
        if self.request.include_usage:
            yield {**self._chunk_fields(), "choices": [], "usage": usage(done)}

    def _chunk_fields(self) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.request.model,
        }

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        finish: str | None,
        extra: Mapping[str, Any],
        top: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish, **extra}
        return {**self._chunk_fields(), "choices": [choice], **(top or {})}


_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def error_body(
    status: int, message: str, field_name: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The envelope of this protocol's errors."""
    return {
        "error": {
            "message": message,
            "type": _ERROR_TYPES.get(status, "server_error"),
            "param": field_name,
            "code": code,
        }
    }


_BODY_READER = BodyReader(
    "messages",
    [
        *SAMPLING_FIELDS,
        "model",
        "tool_choice",
        "functions",
        "function_call",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "response_format",
        "return_token_ids",
        "user",
    ],
    raw_fields=["tools"],
)

CHAT = WireProtocol(
    "chat", "chatcmpl-", read_request, build_response, ChatStream, error_body, _BODY_READER.read
)
CHAT_COUNT_TOKENS = replace(CHAT, count_response=count_response)
"""The same request, of which only the size of its prompt is wanted."""
