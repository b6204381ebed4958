"""Chat Completions, wire ⇄ canonical, and nothing else.

`read` turns a body into what a call needs, `whole` and `Stream` turn its events into what a client of this
protocol expects. Refusals name the field.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from branchline.chat.base import Codec
from branchline.core.call import Request
from branchline.core.errors import MessageError
from branchline.core.message import ToolCall
from branchline.core.runs import Floats, Ids
from branchline.engines.base import SamplingParams
from branchline.gateway.calls import Answer, Asked, Done, Said
from branchline.gateway.live import SessionOptions

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
MOST_CHOICES = 128


@dataclass(frozen=True)
class ChatAsk:
    """A chat completion request, read."""

    asked: Asked
    model: str
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False


def read(
    body: object, options: SessionOptions, *, agent: str, retry: int = 0, default_max_tokens: int = 4096
) -> ChatAsk:
    """A request's body; the session's own sampling goes before the client's."""
    if not isinstance(body, dict):
        raise MessageError("body", body, "a JSON object")
    given = {
        **options.sampling_defaults,
        **{k: v for k, v in body.items() if v is not None},
        **options.sampling,
    }
    tool_choice = given.get("tool_choice")
    without_tools = {**body, "tools": None} if tool_choice == "none" else body
    request = Request.read(without_tools, agent=agent)
    params = _params(given, default_max_tokens)
    request = Request(
        request.messages,
        request.tools,
        request.template,
        request.agent,
        retry,
        sampling={name: given[name] for name in _SAMPLING if name in given},
        equivalences=request.equivalences,
    )
    stream_options = given.get("stream_options") or {}
    return ChatAsk(
        Asked(request, params, _whole_number(given, "n", 1, 1, MOST_CHOICES)),
        str(given.get("model") or "branchline"),
        stream=_flag(given, "stream"),
        include_usage=isinstance(stream_options, dict) and bool(stream_options.get("include_usage")),
        logprobs=_flag(given, "logprobs"),
        return_token_ids=_flag(given, "return_token_ids"),
    )


def _params(given: Mapping[str, Any], default_max_tokens: int) -> SamplingParams:
    plain = SamplingParams()
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    stop = given.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise MessageError("stop", stop, "a string or a list of strings")
    wanted = given.get("response_format")
    grammar = None if not wanted or wanted == {"type": "text"} else wanted
    if grammar is not None and not isinstance(grammar, dict):
        raise MessageError("response_format", grammar, "an object")
    return SamplingParams(
        max_tokens=_whole_number(given, name, default_max_tokens, 1, 2**31),
        temperature=_number(given, "temperature", plain.temperature, 0, 100),
        top_p=_number(given, "top_p", plain.top_p, 0, 1),
        top_k=max(0, _whole_number(given, "top_k", plain.top_k, -1, 2**31)),
        min_p=_number(given, "min_p", plain.min_p, 0, 1),
        presence_penalty=_number(given, "presence_penalty", plain.presence_penalty, -2, 2),
        frequency_penalty=_number(given, "frequency_penalty", plain.frequency_penalty, -2, 2),
        repetition_penalty=_number(given, "repetition_penalty", plain.repetition_penalty, 0.01, 100),
        seed=_whole_number(given, "seed", 0, -(2**63), 2**63) if "seed" in given else None,
        stop=tuple(stop),
        grammar=grammar,
    )


def _number(given: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise MessageError(name, value, f"a number from {least:g} to {most:g}")
    return float(value)


def _whole_number(given: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise MessageError(name, value, f"a whole number from {least} to {most}")
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise MessageError(name, value, "true or false")
    return value


# -- answers -----------------------------------------------------------------------------------------


def whole(ask: ChatAsk, done: Done, codec: Codec) -> dict[str, Any]:
    """The whole response."""
    response = {
        "id": done.call.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [_choice(ask, index, answer, codec) for index, answer in enumerate(done.answers)],
        "usage": _usage(done),
    }
    if ask.return_token_ids:
        response["prompt_token_ids"] = done.prompt_ids.tolist()
    return response


def _choice(ask: ChatAsk, index: int, answer: Answer, codec: Codec) -> dict[str, Any]:
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


def _usage(done: Done) -> dict[str, int]:
    prompt, sampled = len(done.prompt_ids), sum(len(answer.ids) for answer in done.answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(ids: Ids, logprobs: Floats | None, codec: Codec) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    content = []
    for token, logprob in zip(ids, logprobs.tolist(), strict=True):
        text = codec.decode(np.array([token], np.int32))
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


@dataclass
class Stream:
    """The events of a streamed response: `data:` objects in order; the finish leaves with `end`."""

    ask: ChatAsk
    call_id: str
    codec: Codec
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)

    def said(self, said: Said) -> Iterator[dict[str, Any]]:
        """What one bit of an answer becomes."""
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

    def end(self, done: Done) -> Iterator[dict[str, Any]]:
        """The finish of each choice, then the usage where it was asked for."""
        for index, answer in enumerate(done.answers):
            first = {} if index in self._begun else {"role": "assistant", "content": ""}
            extra: dict[str, Any] = {}
            if self.ask.return_token_ids and index == 0:
                extra["prompt_token_ids"] = done.prompt_ids.tolist()
            yield self._chunk(index, first, answer.finish, {}, extra)
        if self.ask.include_usage:
            yield {**self._frame(), "choices": [], "usage": _usage(done)}

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


def error(status: int, message: str, field_name: str | None = None, kind: str = "") -> dict[str, Any]:
    """The envelope of this protocol's errors."""
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        409: "conflict_error",
        429: "rate_limit_error",
    }
    return {
        "error": {
            "message": message,
            "type": kind or kinds.get(status, "server_error"),
            "param": field_name,
            "code": None,
        }
    }


def models(names: Sequence[str]) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": 0, "owned_by": "branchline"} for name in names],
    }
