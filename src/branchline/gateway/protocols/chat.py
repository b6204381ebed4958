"""Chat Completions ⇄ canonical requests and answers.

`tool_choice: none` hides the tools from the model. `required`, `auto` or a named tool show them and leave
the choice to the model, which is counted as not applied: a forced call would be sampled in a context that the
template never produces.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from branchline.chat.base import Codec
from branchline.core.call import Request
from branchline.core.reader import read_messages, write_message
from branchline.gateway.protocols.base import (
    MAX_CHOICES,
    CompletionRequest,
    ErrorInfo,
    RequestContext,
    WireProtocol,
    read_include_usage,
    sse_event,
)
from branchline.gateway.protocols.logprobs import logprob_entries
from branchline.gateway.protocols.openai_tools import (
    ToolSet,
    is_run_by_client,
    read_message_with_custom_calls,
    read_tool_set,
    restore_custom_arguments,
    translate_tool_choice,
)
from branchline.runtime.answer import Answer, AnswerDelta
from branchline.runtime.call_record import CallRequest, CallResult
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.message_cache import BodyReader, parse_json
from branchline.runtime.request_fields import READ_FIELDS
from branchline.runtime.sampling import (
    JsonObject,
    explicit_sampling,
    merge_fields,
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
    """A Chat Completions request in canonical form."""

    tool_set: ToolSet = field(default_factory=ToolSet)


def read_request(body: object, context: RequestContext) -> ChatRequest:
    """Reads a body; the session's own sampling overrides the client's."""
    options = context.managed.options
    fields = merge_sampling(body, options)
    assert isinstance(body, dict)
    # The session's limit has precedence, whichever of the two names the client uses.
    is_newer = "max_completion_tokens" in fields and "max_tokens" not in options.sampling
    max_tokens_name = "max_completion_tokens" if is_newer else "max_tokens"
    cache, messages = context.managed.message_cache, body.get("messages")
    tool_set = read_tool_set(body, fields, cache)
    if not isinstance(messages, list) or not messages:
        messages = read_messages(messages)
    else:
        messages = cache.read_items(messages, read_message_with_custom_calls)
    if tool_set.aliases:
        messages = [restore_custom_arguments(message, context.managed.session.tree) for message in messages]
    request = Request.read(
        body,
        agent=context.agent,
        messages=tuple(messages),
        tools=tool_set.tools,
        retry_count=context.retry_count,
        spawned_by=context.spawned_by,
        sampling=explicit_sampling(fields, max_tokens_name),
    )
    include_usage, not_applied = read_include_usage(fields) if "stream_options" in fields else (False, ())
    top_logprobs = "top_logprobs" in fields and read_int(fields, "top_logprobs", 0, 0, 2**31) > 0
    return ChatRequest(
        CallRequest(
            request,
            read_sampling_params(
                fields, max_tokens_name, context.default_max_tokens, context.max_tokens_limit
            ),
            n=read_int(fields, "n", 1, 1, MAX_CHOICES) if "n" in fields else 1,
            stream=read_bool(fields, "stream"),
            stop=read_strings(fields, "stop") if "stop" in fields else (),
            single_tool_call=tool_set.is_legacy or not read_bool(fields, "parallel_tool_calls", True),
            tool_choice=tool_set.choice,
            not_applied=(*tool_set.not_applied, *not_applied, *(("top_logprobs",) if top_logprobs else ())),
            other_fields={name: body[name] for name in body.keys() - _READ_FIELDS if body[name] is not None},
        ),
        context.model,
        include_usage=include_usage,
        logprobs=read_bool(fields, "logprobs"),
        top_logprobs=top_logprobs,
        return_token_ids=read_bool(fields, "return_token_ids"),
        tool_set=tool_set,
    )


def for_upstream(body: bytes, call_request: CallRequest, session: SessionOptions) -> CallRequest:
    """The call with the fields and messages of its body as they are, for an upstream of the same protocol."""
    fields = parse_json(body)  # may fail in a field that was not decoded before
    request = call_request.request
    messages = [
        raw if _is_known_to_upstreams(raw) else write_message(message)
        for raw, message in zip(fields["messages"], request.messages, strict=True)
    ]
    options = _upstream_options(fields, session, request.tools)
    return replace(call_request, upstream_options=options, upstream_messages=messages)


def _is_known_to_upstreams(message: JsonObject) -> bool:
    """Whether a message has the form in which the upstream is offered tools: not as legacy functions, not as
    custom tools."""
    calls = message.get("tool_calls")
    is_custom = isinstance(calls, list) and any(call.get("type") not in (None, "function") for call in calls)
    return not is_custom and message.get("function_call") is None and message.get("role") != "function"


def _upstream_options(
    fields: JsonObject, session: SessionOptions, tools: Sequence[JsonObject]
) -> dict[str, Any]:
    """All fields of a body, also those that are not read here.

    The session's sampling is merged in. `tools` has only those that the upstream runs itself.
    """
    forwarded = {
        name: value for name, value in fields.items() if value is not None and name not in _OVERRIDDEN_FIELDS
    }
    options = merge_fields(forwarded, session)
    if "max_completion_tokens" in options:
        # Two names of one limit: the session's own has precedence, then the newer name.
        options.pop("max_completion_tokens" if "max_tokens" in session.sampling else "max_tokens", None)
    options.pop("n", None)
    choice = options.pop("function_call", None)
    if isinstance(choice, dict):
        options["tool_choice"] = {"type": "function", "function": choice}
    if "tools" in options:
        options["tools"] = [tool for tool in options["tools"] if not is_run_by_client(tool)]
    if "tool_choice" in options:
        options["tool_choice"] = translate_tool_choice(options["tool_choice"], tools)
    return options


# -- answers -----------------------------------------------------------------------------------------


def build_response(parsed: ChatRequest, result: CallResult, codec: Codec) -> dict[str, Any]:
    response = {
        "id": result.call_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": parsed.model,
        "choices": [_choice(parsed, index, answer, codec) for index, answer in enumerate(result.answers)],
        "usage": usage(result),
    }
    if parsed.return_token_ids:
        response["prompt_token_ids"] = result.prompt_ids.tolist()
    return response


def _choice(parsed: ChatRequest, index: int, answer: Answer, codec: Codec) -> dict[str, Any]:
    message = answer.message
    is_other = message.tool_calls or message.refusal
    fields: dict[str, Any] = {"role": "assistant", "content": message.content or (None if is_other else "")}
    if message.refusal:
        fields["refusal"] = message.refusal
    if message.reasoning_content:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        fields |= parsed.tool_set.to_wire(message.tool_calls)
    if message.extra_fields:
        fields = {**parse_json(message.extra_fields.encode()), **fields}
    choice: dict[str, Any] = {
        "index": index,
        "message": fields,
        "finish_reason": parsed.tool_set.finish_reason(answer.finish_reason),
        "logprobs": _logprobs(parsed, answer, codec) if parsed.logprobs else None,
    }
    if parsed.return_token_ids:
        choice["token_ids"] = answer.ids.tolist()
        if answer.num_preempted:
            choice["num_preempted"] = answer.num_preempted
    return choice


def usage(result: CallResult) -> dict[str, Any]:
    if result.upstream_usage is not None and result.upstream_usage.fields:
        prompt, sampled = result.prompt_tokens, result.sampled_tokens
        return {"total_tokens": prompt + sampled, **result.upstream_usage.fields}
    prompt, sampled = result.prompt_tokens, result.sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(parsed: CompletionRequest, tokens: Answer | AnswerDelta, codec: Codec) -> dict[str, Any] | None:
    if tokens.logprob_entries:
        return {"content": tokens.logprob_entries, "refusal": None}
    if tokens.logprobs is None:
        return None
    entries = logprob_entries(tokens.ids, tokens.logprobs, codec, with_top_logprobs=parsed.top_logprobs)
    return {"content": entries, "refusal": None}


def model_list(names: Sequence[str]) -> dict[str, Any]:
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "branchline"} for name in names]
    return {"object": "list", "data": models}


def count_response(tokens: int) -> dict[str, Any]:
    """The response to `count_tokens`; the field is named as in a response's usage."""
    return {"prompt_tokens": tokens}


@dataclass
class ChatStream:
    """The events of a streamed response."""

    parsed: ChatRequest
    call_id: str
    codec: Codec
    created: int = field(default_factory=lambda: int(time.time()))
    _started_choices: set[int] = field(default_factory=set)

    def encode_delta(self, delta: AnswerDelta) -> bytes:
        first = self._first_delta(delta.index)
        contents: list[JsonObject] = [first] if first else []
        for part in delta.deltas:
            if part.tool_call is not None:
                contents.append(self.parsed.tool_set.to_wire([part.tool_call], part.index))
            elif part.reasoning_content:
                contents.append({"reasoning_content": part.reasoning_content})
            elif part.content:
                contents.append({"content": part.content})
        tokens: dict[str, Any] = {}
        if self.parsed.logprobs:
            tokens["logprobs"] = _logprobs(self.parsed, delta, self.codec)
        if self.parsed.return_token_ids:
            tokens["token_ids"] = delta.ids.tolist()
        if delta.extra:
            contents.append(delta.extra)
        if not contents and tokens and (len(delta.ids) or delta.logprob_entries):
            contents.append({})
        choices = [{"index": delta.index, "delta": content, "finish_reason": None} for content in contents]
        if choices:
            # Each token is reported once: with the last chunk that it produced.
            choices[-1] |= tokens
        return b"".join([self._event([choice]) for choice in choices])

    def encode_end(self, result: CallResult) -> bytes:
        """The finish reason of each choice, then the usage if it was requested."""
        events: list[bytes] = []
        for index, answer in enumerate(result.answers):
            if refusal := answer.message.refusal:
                delta = {**self._first_delta(index), "refusal": refusal}
                events.append(self._event([{"index": index, "delta": delta, "finish_reason": None}]))
            finish_reason = self.parsed.tool_set.finish_reason(answer.finish_reason)
            last = {"index": index, "delta": self._first_delta(index), "finish_reason": finish_reason}
            if self.parsed.return_token_ids and answer.num_preempted:
                last["num_preempted"] = answer.num_preempted
            has_prompt_ids = self.parsed.return_token_ids and index == 0
            prompt_ids = {"prompt_token_ids": result.prompt_ids.tolist()} if has_prompt_ids else {}
            events.append(self._event([last], **prompt_ids))
        if self.parsed.include_usage:
            events.append(self._event([], usage=usage(result)))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def encode_ping(self) -> bytes:
        return self._event([{"index": 0, "delta": self._first_delta(0), "finish_reason": None}])

    def encode_error(self, info: ErrorInfo) -> bytes:
        return sse_event({**error_body(info), "status": info.status})

    def _first_delta(self, index: int) -> dict[str, Any]:
        """The delta of a choice's first chunk; {} if the choice has started."""
        if index in self._started_choices:
            return {}
        self._started_choices.add(index)
        return {"role": "assistant", "content": ""}

    def _event(self, choices: Sequence[JsonObject], **fields: Any) -> bytes:
        chunk = {
            "id": self.call_id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.parsed.model,
            "choices": choices,
            **fields,
        }
        return sse_event(chunk)


_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


def error_body(info: ErrorInfo) -> dict[str, Any]:
    """OpenAI's error envelope."""
    kind = info.type or _ERROR_TYPES.get(info.status, "server_error")
    return {"error": {"message": info.message, "type": kind, "param": info.param, "code": info.code}}


_READ_FIELDS = READ_FIELDS["chat/completions"]
_BODY_READER = BodyReader("messages", sorted(_READ_FIELDS - {"messages", "tools"}), raw_fields=["tools"])

CHAT = WireProtocol(
    "chat",
    "chatcmpl-",
    read_request,
    build_response,
    ChatStream,
    error_body,
    _BODY_READER.read,
    count_response,
)
