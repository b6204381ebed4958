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

from branchline.core.call import Request
from branchline.core.echo import Equivalence
from branchline.core.errors import MessageError
from branchline.core.fields import clean
from branchline.core.message import Message
from branchline.gateway.calls import Asked
from branchline.gateway.protocols.base import (
    Caller,
    Fields,
    Wire,
    flag,
    given_sampling,
    model_name,
    sampling_params,
    whole_number,
    wishes,
)
from branchline.gateway.protocols.chat import error
from branchline.gateway.protocols.responses_answers import ResponsesAsk, whole
from branchline.gateway.protocols.responses_items import ItemReader
from branchline.gateway.protocols.responses_past import ID_PREFIX, Past
from branchline.gateway.protocols.responses_stream import Stream
from branchline.gateway.protocols.tools import read_tools
from branchline.gateway.wire import CONTEXT_LENGTH

_SHOWN: dict[str, Any] = {
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
_ELSEWHERE = {
    "conversation": "nothing: send the whole input, or previous_response_id",
    "prompt": "nothing: send instructions and input, prompts are not kept here",
}


def read(body: object, caller: Caller) -> ResponsesAsk:
    """A request's body; the session's own sampling goes before the client's."""
    if not isinstance(body, dict):
        raise MessageError("body", body, "a JSON object")
    own = {name: value for name, value in body.items() if value is not None}
    _refuse_what_is_not_here(own)
    given = wishes({**own, **_renamed(own)}, caller)
    past = Past(caller.live.session.tree)
    reader = ItemReader(past)
    messages = _messages(own, past, reader)
    tools, aliases = read_tools(own.get("tools"))
    request = Request(
        messages,
        () if _choice(given) == "none" else (*tools, *reader.tools),
        template=_object(own, "chat_template_kwargs"),
        agent=caller.agent,
        retry=caller.retry,
        spawned_by=caller.spawned_by,
        sampling=given_sampling(given, "max_tokens"),
        equivalences=(Equivalence.EMPTY_TOOLS,) if own.get("tools") == [] else (),
        instructed=bool(own.get("instructions")),
    )
    include = own.get("include") or []
    if not isinstance(include, list):
        raise MessageError("include", include, "a list of strings")
    _object(own, "metadata")
    return ResponsesAsk(
        Asked(
            request,
            sampling_params(given, "max_tokens", caller),
            single_call=not flag(given, "parallel_tool_calls", True),
            tool_choice=_choice(given),
        ),
        model_name(given),
        stream=flag(given, "stream"),
        aliases={**aliases, **reader.aliases},
        is_summary=_object(own, "reasoning").get("summary") not in (None, "none"),
        is_sealed="reasoning.encrypted_content" in include,
        logprobs="message.output_text.logprobs" in include,
        top_logprobs=whole_number(own, "top_logprobs", 0, 0, 2**31) > 0,
        shown={name: _written(own.get(name, plain), name) for name, plain in _SHOWN.items()},
    )


def _refuse_what_is_not_here(own: Fields) -> None:
    if flag(own, "background"):
        raise MessageError("background", True, "false: an answer is told to the one who waits for it")
    for name, expected in _ELSEWHERE.items():
        if name in own:
            raise MessageError(name, own[name], expected)


def _renamed(own: Fields) -> dict[str, Any]:
    """Sampling fields by the names they have everywhere else."""
    renamed: dict[str, Any] = {}
    if "max_output_tokens" in own:
        renamed["max_tokens"] = whole_number(own, "max_output_tokens", 0, 1, 2**31)
    wanted = _object(_object(own, "text"), "format", "text.format")
    if wanted.get("type") == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type"}
        renamed["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted:
        renamed["response_format"] = wanted
    return renamed


def _messages(own: Fields, past: Past, reader: ItemReader) -> tuple[Message, ...]:
    """Instructions, then what `previous_response_id` stands for, then the input."""
    messages: list[Message] = []
    instructions = own.get("instructions", "")
    if not isinstance(instructions, str):
        raise MessageError("instructions", instructions, "a string or null")
    if instructions:
        messages.append(Message("system", clean(instructions)))
    if "previous_response_id" in own:
        messages += past.conversation(own["previous_response_id"])
    messages += reader.read(own.get("input"))
    if not messages:
        raise MessageError("input", own["input"], "a string or a list with at least one message")
    return tuple(messages)


def _choice(given: Fields) -> object:
    """Which tool to call, as Chat Completions say it."""
    choice = given.get("tool_choice", "auto")
    if not isinstance(choice, dict) and choice not in ("auto", "none", "required"):
        raise MessageError("tool_choice", choice, "none, auto, required or an object")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = {name: value for name, value in choice.items() if name != "type"}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return None if choice == "auto" else choice


def _object(given: Fields, name: str, field_name: str = "") -> dict[str, Any]:
    value = given.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MessageError(field_name or name, value, "an object or null")
    return value


def _written(value: object, name: str) -> msgspec.Raw:
    """A value as it will be repeated, written once for all the events that repeat it."""
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except RecursionError:
        raise MessageError(name, "…", "JSON that is nested less deeply") from None


def count(tokens: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": tokens}


RESPONSES = Wire("responses", ID_PREFIX, read, whole, Stream, error, told_inside=frozenset({CONTEXT_LENGTH}))
INPUT_TOKENS = replace(RESPONSES, count=count)
"""The same request, of which only the size of its prompt is wanted."""
