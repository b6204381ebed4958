"""Responses, wire ⇄ canonical, and nothing else: the request here; items, tools and answers beside it.

`previous_response_id` is answered from the session's tree: the conversation up to that response and in it
goes before the input, its instructions left out, as the protocol has it. Whatever is only for a vendor's own
servers (`store`, `truncation`, `service_tier`) is taken and repeated. Tools are shown and hidden as in Chat
Completions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from branchline.core.call import Equivalence, Request
from branchline.core.errors import MessageError
from branchline.core.message import Message
from branchline.core.reader import replace_surrogates
from branchline.gateway.http_errors import CONTEXT_LENGTH_EXCEEDED
from branchline.gateway.protocols.base import RequestContext, WireProtocol, read_model_name
from branchline.gateway.protocols.chat import error_body
from branchline.gateway.protocols.openai_tools import read_openai_tools, translate_tool_choice
from branchline.gateway.protocols.responses_history import RESPONSE_ID_PREFIX, ResponseHistory
from branchline.gateway.protocols.responses_items import ItemReader
from branchline.gateway.protocols.responses_output import ResponsesRequest, build_response
from branchline.gateway.protocols.responses_stream import ResponsesStream
from branchline.runtime.call_record import CallRequest
from branchline.runtime.sampling import (
    JsonObject,
    explicit_sampling,
    merge_sampling,
    read_bool,
    read_int,
    read_sampling_params,
    read_strings,
)

_ECHOED_DEFAULTS: dict[str, Any] = {
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
"""Fields of a request that its response repeats, and what stands there where it did not say."""
_UNSUPPORTED = {
    "conversation": "nothing: send the whole input, or previous_response_id",
    "prompt": "nothing: send instructions and input, prompts are not kept here",
}


def read_request(body: object, caller: RequestContext) -> ResponsesRequest:
    """A request's body; the session's own sampling goes before the client's."""
    if not isinstance(body, dict):
        raise MessageError("body", body, "a JSON object")
    own = {name: value for name, value in body.items() if value is not None}
    _reject_unsupported(own)
    given = merge_sampling({**own, **_chat_sampling_fields(own)}, caller.managed.options)
    past = ResponseHistory(caller.managed.session.tree)
    reader = ItemReader(past)
    messages = _read_messages(own, past, reader)
    tools, aliases = read_openai_tools(own.get("tools"))
    request = Request(
        messages,
        () if _read_tool_choice(given) == "none" else (*tools, *reader.tools),
        chat_template_kwargs=_read_object(own, "chat_template_kwargs"),
        agent=caller.agent,
        retry_count=caller.retry,
        spawned_by=caller.spawned_by,
        sampling=explicit_sampling(given, "max_tokens"),
        equivalences=(Equivalence.EMPTY_TOOLS,) if own.get("tools") == [] else (),
        has_instructions=bool(own.get("instructions")),
    )
    include = own.get("include") or []
    if not isinstance(include, list):
        raise MessageError("include", include, "a list of strings")
    _read_object(own, "metadata")
    return ResponsesRequest(
        CallRequest(
            request,
            read_sampling_params(
                given,
                "max_tokens",
                default_max_tokens=caller.default_max_tokens,
                max_tokens_limit=caller.max_tokens_limit,
            ),
            stop=read_strings(given, "stop"),
            single_tool_call=not read_bool(given, "parallel_tool_calls", True),
            tool_choice=translate_tool_choice(_read_tool_choice(given), request.tools),
            stream=read_bool(given, "stream"),
        ),
        read_model_name(given),
        aliases={**aliases, **reader.aliases},
        reasoning_as_summary=_read_object(own, "reasoning").get("summary") not in (None, "none"),
        include_encrypted_reasoning="reasoning.encrypted_content" in include,
        logprobs="message.output_text.logprobs" in include,
        top_logprobs=read_int(own, "top_logprobs", 0, 0, 2**31) > 0,
        echoed_fields={
            name: _encode_raw(own.get(name, plain), name) for name, plain in _ECHOED_DEFAULTS.items()
        },
    )


def _reject_unsupported(own: JsonObject) -> None:
    if read_bool(own, "background"):
        raise MessageError("background", True, "false: an answer is told to the one who waits for it")
    for name, expected in _UNSUPPORTED.items():
        if name in own:
            raise MessageError(name, own[name], expected)


def _chat_sampling_fields(own: JsonObject) -> dict[str, Any]:
    """Sampling fields by the names they have everywhere else."""
    renamed: dict[str, Any] = {}
    if "max_output_tokens" in own:
        renamed["max_tokens"] = read_int(own, "max_output_tokens", 0, 1, 2**31)
    wanted = _read_object(_read_object(own, "text"), "format", "text.format")
    if wanted.get("type") == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type"}
        renamed["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted:
        renamed["response_format"] = wanted
    return renamed


def _read_messages(own: JsonObject, past: ResponseHistory, reader: ItemReader) -> tuple[Message, ...]:
    """Instructions, then what `previous_response_id` stands for, then the input."""
    messages: list[Message] = []
    instructions = own.get("instructions", "")
    if not isinstance(instructions, str):
        raise MessageError("instructions", instructions, "a string or null")
    if instructions:
        messages.append(Message("system", replace_surrogates(instructions)))
    if "previous_response_id" in own:
        messages += past.messages_through(own["previous_response_id"])
    messages += reader.read(own.get("input"))
    if not messages:
        raise MessageError("input", own["input"], "a string or a list with at least one message")
    return tuple(messages)


def _read_tool_choice(given: JsonObject) -> object:
    """Which tool to call, as Chat Completions say it."""
    choice = given.get("tool_choice", "auto")
    if not isinstance(choice, dict) and choice not in ("auto", "none", "required"):
        raise MessageError("tool_choice", choice, "none, auto, required or an object")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = {name: value for name, value in choice.items() if name != "type"}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return None if choice == "auto" else choice


def _read_object(given: JsonObject, name: str, field_name: str = "") -> dict[str, Any]:
    value = given.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MessageError(field_name or name, value, "an object or null")
    return value


def _encode_raw(value: object, name: str) -> msgspec.Raw:
    """A value as it will be repeated, written once for all the events that repeat it."""
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except RecursionError:
        raise MessageError(name, "…", "JSON that is nested less deeply") from None


def count_response(tokens: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": tokens}


RESPONSES = WireProtocol(
    "responses",
    RESPONSE_ID_PREFIX,
    read_request,
    build_response,
    ResponsesStream,
    error_body,
    in_stream_errors=frozenset({CONTEXT_LENGTH_EXCEEDED}),
)
RESPONSES_COUNT_TOKENS = replace(RESPONSES, count_response=count_response)
"""The same request, of which only the size of its prompt is wanted."""
