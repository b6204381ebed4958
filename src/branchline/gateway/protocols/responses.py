"""Responses ⇄ canonical requests and answers; items are in `responses_input` and `responses_output`.

`previous_response_id` is resolved in the session's tree: the conversation up to and including that response
precedes the input, without its instructions, as the protocol defines. Fields for a vendor's own servers
(`store`, `truncation`, `service_tier`) are accepted and repeated. Tools are shown and hidden as in Chat
Completions.
"""

from __future__ import annotations

from typing import Any

import msgspec

from branchline.core.call import Equivalence, Request
from branchline.core.errors import MessageError
from branchline.core.message import Message
from branchline.core.reader import replace_surrogates
from branchline.gateway.protocols.base import (
    CONTEXT_LENGTH_EXCEEDED,
    RequestContext,
    WireProtocol,
)
from branchline.gateway.protocols.chat import error_body
from branchline.gateway.protocols.openai_tools import read_openai_tools, translate_tool_choice
from branchline.gateway.protocols.responses_input import RESPONSE_ID_PREFIX, ItemReader, ResponseHistory
from branchline.gateway.protocols.responses_output import ResponsesRequest, ResponsesStream, build_response
from branchline.runtime.call_record import CallRequest
from branchline.runtime.request_fields import READ_FIELDS
from branchline.runtime.sampling import (
    JsonObject,
    explicit_sampling,
    merge_sampling,
    read_bool,
    read_int,
    read_sampling_params,
    read_strings,
)

ECHOED_DEFAULTS: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a request that its response repeats, and their values if the request has none."""
_READ_FIELDS = READ_FIELDS["responses"]
_REASONING_INCLUDED, _LOGPROBS_INCLUDED = "reasoning.encrypted_content", "message.output_text.logprobs"
_UNSUPPORTED = {
    "conversation": "nothing: send the whole input, or previous_response_id",
    "prompt": "nothing: send instructions and input, prompts are not stored here",
}


def read_request(body: object, context: RequestContext) -> ResponsesRequest:
    """Reads a body; the session's own sampling overrides the client's."""
    if not isinstance(body, dict):
        raise MessageError("body", body, "a JSON object")
    client_fields = {name: value for name, value in body.items() if value is not None}
    _reject_unsupported(client_fields)
    fields = merge_sampling(
        {**client_fields, **_chat_sampling_fields(client_fields)}, context.managed.options
    )
    history = ResponseHistory(context.managed.session.tree)
    reader = ItemReader(history)
    messages = _read_messages(client_fields, history, reader)
    offered = read_openai_tools(client_fields.get("tools"))
    offered.add(reader.offered)
    tool_choice = _read_tool_choice(fields)
    request = Request(
        messages,
        () if tool_choice == "none" else tuple(offered.tools),
        chat_template_kwargs=_read_object(client_fields, "chat_template_kwargs"),
        agent=context.agent,
        retry_count=context.retry_count,
        spawned_by=context.spawned_by,
        sampling=explicit_sampling(fields, "max_tokens"),
        equivalences=(Equivalence.EMPTY_TOOLS,) if client_fields.get("tools") == [] else (),
        has_instructions=bool(client_fields.get("instructions")),
    )
    text = {name: value for name, value in _read_object(client_fields, "text").items() if name != "format"}
    include = client_fields.get("include") or []
    if not isinstance(include, list) or not all(isinstance(name, str) for name in include):
        raise MessageError("include", include, "a list of strings")
    top_logprobs = read_int(client_fields, "top_logprobs", 0, 0, 2**31) > 0
    not_applied = set(reader.not_applied)
    not_applied |= set() if tool_choice == "none" else offered.not_applied
    not_applied |= {
        f"include.{name}" for name in include if name not in (_REASONING_INCLUDED, _LOGPROBS_INCLUDED)
    }
    not_applied |= {"top_logprobs"} if top_logprobs else set()
    _read_object(client_fields, "metadata")
    return ResponsesRequest(
        CallRequest(
            request,
            read_sampling_params(fields, "max_tokens", context.default_max_tokens, context.max_tokens_limit),
            stream=read_bool(fields, "stream"),
            stop=read_strings(fields, "stop"),
            single_tool_call=not read_bool(fields, "parallel_tool_calls", True),
            tool_choice=translate_tool_choice(tool_choice, request.tools),
            other_fields={name: client_fields[name] for name in client_fields.keys() - _READ_FIELDS},
            requested={"text": text} if text else {},
            not_applied=tuple(sorted(not_applied)),
            upstream_fields=_upstream_fields(client_fields, text),
        ),
        context.model,
        aliases=offered.aliases,
        reasoning_as_summary=_read_object(client_fields, "reasoning").get("summary") not in (None, "none"),
        include_encrypted_reasoning=_REASONING_INCLUDED in include,
        logprobs=_LOGPROBS_INCLUDED in include,
        top_logprobs=top_logprobs,
        echoed_fields={
            name: _encode_raw(client_fields.get(name, default), name)
            for name, default in ECHOED_DEFAULTS.items()
        },
    )


def _reject_unsupported(fields: JsonObject) -> None:
    if read_bool(fields, "background"):
        raise MessageError("background", True, "false: responses are not stored for later")
    for name, expected in _UNSUPPORTED.items():
        if name in fields:
            raise MessageError(name, fields[name], expected)


def _chat_sampling_fields(fields: JsonObject) -> dict[str, Any]:
    """The sampling fields that have other names here, under the names of Chat Completions."""
    renamed: dict[str, Any] = {}
    if "max_output_tokens" in fields:
        renamed["max_tokens"] = read_int(fields, "max_output_tokens", 0, 1, 2**31)
    format = _read_object(_read_object(fields, "text"), "format", "text.format")
    if format.get("type") == "json_schema":
        schema = {name: value for name, value in format.items() if name != "type"}
        renamed["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif format:
        renamed["response_format"] = format
    return renamed


def _upstream_fields(fields: JsonObject, text: JsonObject) -> dict[str, Any]:
    """What an upstream can follow, under the names of Chat Completions."""
    names = ("metadata", "service_tier", "safety_identifier", "user")
    found = {name: fields[name] for name in names if name in fields}
    effort = _read_object(fields, "reasoning").get("effort")
    include = fields.get("include")
    if effort is not None:
        found["reasoning_effort"] = effort
    if text.get("verbosity") is not None:
        found["verbosity"] = text["verbosity"]
    if isinstance(include, list) and _LOGPROBS_INCLUDED in include:
        found |= {"logprobs": True}
        found |= {"top_logprobs": fields["top_logprobs"]} if "top_logprobs" in fields else {}
    return found


def _read_messages(fields: JsonObject, history: ResponseHistory, reader: ItemReader) -> tuple[Message, ...]:
    """Instructions, then the conversation of `previous_response_id`, then the input."""
    messages: list[Message] = []
    instructions = fields.get("instructions", "")
    if not isinstance(instructions, str):
        raise MessageError("instructions", instructions, "a string or null")
    if instructions:
        messages.append(Message("system", replace_surrogates(instructions)))
    if "previous_response_id" in fields:
        messages += history.messages_through(fields["previous_response_id"])
    messages += reader.read(fields.get("input"))
    if not messages:
        raise MessageError("input", fields["input"], "a string or a list with at least one message")
    return tuple(messages)


def _read_tool_choice(fields: JsonObject) -> object:
    """The `tool_choice` of Chat Completions; None for `auto`."""
    choice = fields.get("tool_choice", "auto")
    if not isinstance(choice, dict) and choice not in ("auto", "none", "required"):
        raise MessageError("tool_choice", choice, "none, auto, required or an object")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = {name: value for name, value in choice.items() if name != "type"}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return None if choice == "auto" else choice


def _read_object(fields: JsonObject, name: str, path: str = "") -> dict[str, Any]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MessageError(path or name, value, "an object or null")
    return value


def _encode_raw(value: object, name: str) -> msgspec.Raw:
    """A value that responses repeat, encoded once for all events that contain it."""
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except RecursionError:
        raise MessageError(name, "…", "JSON that is nested less deeply") from None


def count_response(tokens: int) -> dict[str, Any]:
    """The response to `input_tokens`."""
    return {"object": "response.input_tokens", "input_tokens": tokens}


RESPONSES = WireProtocol(
    "responses",
    RESPONSE_ID_PREFIX,
    read_request,
    build_response,
    ResponsesStream,
    error_body,
    count_response=count_response,
    in_stream_errors=frozenset({CONTEXT_LENGTH_EXCEEDED}),
)
