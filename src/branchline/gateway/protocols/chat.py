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

from branchline.chat.base import Codec
from branchline.core.call import Request
from branchline.core.message import Message
from branchline.core.reader import read_messages
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
    one_line,
    sampling_params,
    sse,
    wants_usage,
    whole_number,
    wishes,
)
from branchline.gateway.protocols.chat_tools import Offer, as_written, read_offer, read_turn
from branchline.gateway.protocols.logprobs import entries


@dataclass(frozen=True)
class ChatAsk(CompletionAsk):
    """A request, read."""

    offer: Offer = field(default_factory=Offer)


def read(body: object, caller: Caller) -> ChatAsk:
    """A request's body; the session's own sampling goes before the client's."""
    given = wishes(body, caller)
    assert isinstance(body, dict)
    # The session's own limit goes before the client's, whichever of the two names the client uses.
    is_newer = "max_completion_tokens" in given and "max_tokens" not in caller.live.options.sampling
    max_tokens = "max_completion_tokens" if is_newer else "max_tokens"
    offer = read_offer(body, given, caller.live.memory)
    request = Request.read(
        body,
        agent=caller.agent,
        messages=_messages(body.get("messages"), caller, offer),
        tools=offer.tools,
        retry=caller.retry,
        spawned_by=caller.spawned_by,
        sampling=given_sampling(given, max_tokens),
    )
    return ChatAsk(
        Asked(
            request,
            sampling_params(given, max_tokens, caller),
            whole_number(given, "n", 1, 1, MOST_CHOICES),
            single_call=offer.is_legacy or not flag(given, "parallel_tool_calls", True),
            new_bytes=caller.live.memory.new_bytes,
        ),
        model_name(given),
        stream=flag(given, "stream"),
        include_usage=wants_usage(given),
        logprobs=flag(given, "logprobs"),
        top_logprobs=whole_number(given, "top_logprobs", 0, 0, 2**31) > 0,
        return_token_ids=flag(given, "return_token_ids"),
        offer=offer,
    )


def _messages(given: object, caller: Caller, offer: Offer) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        return read_messages(given)
    messages = caller.live.memory.read(given, read_turn)
    if offer.aliases:
        messages = [as_written(message, caller.live.session.tree) for message in messages]
    return tuple(messages)


# -- answers -----------------------------------------------------------------------------------------


def whole(ask: ChatAsk, done: Done, codec: Codec) -> dict[str, Any]:
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


def _choice(ask: ChatAsk, index: int, answer: Answer, codec: Codec) -> dict[str, Any]:
    said = answer.message
    message: dict[str, Any] = {"role": "assistant", "content": said.text or None}
    if not (said.calls or said.refusal) and said.text == "":
        message["content"] = ""
    if said.refusal:
        message["refusal"] = said.refusal
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message |= ask.offer.told(said.calls)
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "finish_reason": ask.offer.finish(answer.finish),
    }
    choice["logprobs"] = _logprobs(ask, answer.ids, answer.logprobs, codec) if ask.logprobs else None
    if ask.return_token_ids:
        choice["token_ids"] = answer.ids.tolist()
    return choice


def usage(done: Done) -> dict[str, int]:
    prompt, sampled = done.prompt_tokens, done.sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(ask: CompletionAsk, ids: Ids, logprobs: Floats | None, codec: Codec) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {"content": entries(ids, logprobs, codec, tops=ask.top_logprobs), "refusal": None}


def cards(names: Sequence[str]) -> dict[str, Any]:
    """The models that there are."""
    told = [{"id": name, "object": "model", "created": 0, "owned_by": "branchline"} for name in names]
    return {"object": "list", "data": told}


def count(tokens: int) -> dict[str, Any]:
    """The answer to `count_tokens`, under the name it has in a response's usage."""
    return {"prompt_tokens": tokens}


@dataclass
class Stream:
    """The events of a streamed response; the finish leaves with `end`."""

    ask: ChatAsk
    call_id: str
    codec: Codec
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """What stands around a text in the events of a choice that has begun."""

    def said(self, said: Said) -> bytes:
        """What one bit of an answer becomes."""
        frame = self._frames.get(said.choice)
        if frame is not None and len(said.deltas) == 1 and (text := said.deltas[0].text):
            # Mostly: a token of text, and nothing else to say of it.
            return frame[0] + one_line(text) + frame[1]
        if frame is None and not (self.ask.logprobs or self.ask.return_token_ids):
            before, _, behind = sse(self._chunk(said.choice, {"content": ""}, None, {})).rpartition(b'""')
            self._frames[said.choice] = before, behind
        return b"".join([sse(chunk) for chunk in self._said(said)])

    def end(self, done: Done) -> bytes:
        """The finish of each choice, then the usage where it was asked for."""
        return b"".join([*(sse(chunk) for chunk in self._end(done)), b"data: [DONE]\n\n"])

    def beat(self) -> bytes:
        """A chunk with nothing in it."""
        return sse(self._chunk(0, self._first(0), None, {}))

    def failed(self, status: int, message: str, field_name: str | None, code: str | None) -> bytes:
        return sse({**error(status, message, field_name, code), "status": status})

    def _first(self, choice: int) -> dict[str, Any]:
        """What the first chunk of a choice says."""
        if choice in self._begun:
            return {}
        self._begun.add(choice)
        return {"role": "assistant", "content": ""}

    def _said(self, said: Said) -> Iterator[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if said.choice not in self._begun:
            deltas.append(self._first(said.choice))
        for delta in said.deltas:
            if delta.call is not None:
                deltas.append(self.ask.offer.told([delta.call], delta.index))
            elif delta.reasoning:
                deltas.append({"reasoning_content": delta.reasoning})
            elif delta.text:
                deltas.append({"content": delta.text})
        extra: dict[str, Any] = {}
        if self.ask.logprobs:
            extra["logprobs"] = _logprobs(self.ask, said.ids, said.logprobs, self.codec)
        if self.ask.return_token_ids:
            extra["token_ids"] = said.ids.tolist()
        if not deltas and extra and len(said.ids):
            deltas.append({})
        for place, content in enumerate(deltas):
            # Tokens go with the last delta they made, so that each is told once.
            yield self._chunk(said.choice, content, None, extra if place == len(deltas) - 1 else {})

    def _end(self, done: Done) -> Iterator[dict[str, Any]]:
        for index, answer in enumerate(done.answers):
            extra: dict[str, Any] = {}
            if self.ask.return_token_ids and index == 0:
                extra["prompt_token_ids"] = done.prompt_ids.tolist()
            if answer.message.refusal:
                yield self._chunk(index, {**self._first(index), "refusal": answer.message.refusal}, None, {})
            yield self._chunk(index, self._first(index), self.ask.offer.finish(answer.finish), {}, extra)
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


def error(
    status: int, message: str, field_name: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The envelope of this protocol's errors."""
    return {
        "error": {
            "message": message,
            "type": _KINDS.get(status, "server_error"),
            "param": field_name,
            "code": code,
        }
    }


_BODY = BodyReader(
    "messages",
    [
        *SAMPLING,
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
    kept=["tools"],
)

CHAT = Wire("chat", "chatcmpl-", read, whole, Stream, error, _BODY.read)
PROMPT_TOKENS = replace(CHAT, count=count)
"""The same request, of which only the size of its prompt is wanted."""
