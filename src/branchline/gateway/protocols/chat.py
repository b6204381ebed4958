"""Chat Completions, wire ⇄ canonical, and nothing else.

`tool_choice: none` hides the tools from the model. `required`, `auto` or a named tool show them and leave
the choice to the model: forcing a call would sample what its template never writes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from branchline.chat.base import Codec
from branchline.core.call import Request
from branchline.core.errors import MessageError
from branchline.core.message import Message, ToolCall
from branchline.core.reader import ToolList, read_message, read_messages, read_tools
from branchline.core.runs import Floats, Ids
from branchline.gateway.answers import Answer, Said
from branchline.gateway.bodies import BodyReader
from branchline.gateway.calls import Asked, Done
from branchline.gateway.protocols.base import (
    MOST_CHOICES,
    SAMPLING,
    Caller,
    CompletionAsk,
    Wire,
    flag,
    given_sampling,
    model_name,
    sampling_params,
    sse,
    wants_usage,
    whole_number,
    wishes,
)


def read(body: object, caller: Caller) -> CompletionAsk:
    """A request's body; the session's own sampling goes before the client's."""
    given = wishes(body, caller)
    assert isinstance(body, dict)
    request = Request.read(
        body,
        agent=caller.agent,
        messages=_messages(body.get("messages"), caller),
        tools=ToolList() if _hides_tools(given) else caller.live.memory.value(body.get("tools"), read_tools),
    )
    # The session's own limit goes before the client's, whichever of the two names the client uses.
    is_newer = "max_completion_tokens" in given and "max_tokens" not in caller.live.options.sampling
    max_tokens = "max_completion_tokens" if is_newer else "max_tokens"
    request = replace(
        request,
        retry=caller.retry,
        spawned_by=caller.spawned_by,
        sampling=given_sampling(given, max_tokens),
    )
    return CompletionAsk(
        Asked(
            request,
            sampling_params(given, max_tokens, caller),
            whole_number(given, "n", 1, 1, MOST_CHOICES),
            single_call=not flag(given, "parallel_tool_calls", True),
            new_bytes=caller.live.memory.new_bytes,
        ),
        model_name(given),
        stream=flag(given, "stream"),
        include_usage=wants_usage(given),
        logprobs=flag(given, "logprobs"),
        return_token_ids=flag(given, "return_token_ids"),
    )


def _messages(given: object, caller: Caller) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        return read_messages(given)
    read = caller.live.memory.read
    return tuple(read(given, lambda raw, place: read_message(raw, "messages", place)))


def _hides_tools(given: Mapping[str, Any]) -> bool:
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none", "required") and not isinstance(choice, dict):
        raise MessageError("tool_choice", choice, "none, auto, required or a tool's name in an object")
    return bool(choice == "none")


# -- answers -----------------------------------------------------------------------------------------


def whole(ask: CompletionAsk, done: Done, codec: Codec) -> dict[str, Any]:
    """The whole response."""
    response = {
        "id": done.call.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [_choice(ask, index, answer, codec) for index, answer in enumerate(done.answers)],
        "usage": usage(done),
    }
    if ask.return_token_ids:
        response["prompt_token_ids"] = done.prompt_ids.tolist()
    return response


def _choice(ask: CompletionAsk, index: int, answer: Answer, codec: Codec) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.text or None}
    if not answer.message.calls and answer.message.text == "":
        message["content"] = ""
    if answer.message.reasoning:
        message["reasoning_content"] = answer.message.reasoning
    if answer.message.calls:
        message["tool_calls"] = [_tool_call(call) for call in answer.message.calls]
    choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": answer.finish}
    choice["logprobs"] = _logprobs(answer.ids, answer.logprobs, codec) if ask.logprobs else None
    if ask.return_token_ids:
        choice["token_ids"] = answer.ids.tolist()
    return choice


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage(done: Done) -> dict[str, int]:
    prompt, sampled = done.prompt_tokens, done.sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(ids: Ids, logprobs: Floats | None, codec: Codec) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    content = []
    for token, logprob in zip(ids, logprobs.tolist(), strict=True):
        text = codec.decode(np.array([token], np.int32))
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def count(tokens: int) -> dict[str, Any]:
    """The answer to `count_tokens`, under the name it has in a response's usage."""
    return {"prompt_tokens": tokens}


@dataclass
class Stream:
    """The events of a streamed response; the finish leaves with `end`."""

    ask: CompletionAsk
    call_id: str
    codec: Codec
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)

    def said(self, said: Said) -> bytes:
        """What one bit of an answer becomes."""
        return b"".join([sse(chunk) for chunk in self._said(said)])

    def end(self, done: Done) -> bytes:
        """The finish of each choice, then the usage where it was asked for."""
        return b"".join([*(sse(chunk) for chunk in self._end(done)), b"data: [DONE]\n\n"])

    def failed(self, status: int, message: str, field_name: str | None) -> bytes:
        return sse({**error(status, message, field_name), "status": status})

    def _said(self, said: Said) -> Iterator[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if said.choice not in self._begun:
            self._begun.add(said.choice)
            deltas.append({"role": "assistant", "content": ""})
        for delta in said.deltas:
            if delta.call is not None:
                deltas.append({"tool_calls": [{"index": delta.index, **_tool_call(delta.call)}]})
            elif delta.reasoning:
                deltas.append({"reasoning_content": delta.reasoning})
            elif delta.text:
                deltas.append({"content": delta.text})
        extra: dict[str, Any] = {}
        if self.ask.logprobs:
            extra["logprobs"] = _logprobs(said.ids, said.logprobs, self.codec)
        if self.ask.return_token_ids:
            extra["token_ids"] = said.ids.tolist()
        if not deltas and extra and len(said.ids):
            deltas.append({})
        for place, content in enumerate(deltas):
            # Tokens go with the last delta they made, so that each is told once.
            yield self._chunk(said.choice, content, None, extra if place == len(deltas) - 1 else {})

    def _end(self, done: Done) -> Iterator[dict[str, Any]]:
        for index, answer in enumerate(done.answers):
            first = {} if index in self._begun else {"role": "assistant", "content": ""}
            extra: dict[str, Any] = {}
            if self.ask.return_token_ids and index == 0:
                extra["prompt_token_ids"] = done.prompt_ids.tolist()
            yield self._chunk(index, first, answer.finish, {}, extra)
        if self.ask.include_usage:
            yield {**self._frame(), "choices": [], "usage": usage(done)}

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.ask.model,
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
        return {**self._frame(), "choices": [choice], **(top or {})}


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def error(status: int, message: str, field_name: str | None = None) -> dict[str, Any]:
    """The envelope of this protocol's errors."""
    return {
        "error": {
            "message": message,
            "type": _KINDS.get(status, "server_error"),
            "param": field_name,
            "code": None,
        }
    }


_BODY = BodyReader(
    "messages",
    [
        *SAMPLING,
        "model",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "response_format",
        "return_token_ids",
        "user",
    ],
    kept=["tools"],
)

CHAT = Wire("chat", "chatcmpl-", read, whole, Stream, error, _BODY.read)
PROMPT_TOKENS = replace(CHAT, count=count)
"""The same request, of which only the size of its prompt is wanted."""
