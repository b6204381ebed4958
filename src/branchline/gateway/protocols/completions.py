"""Text completions, wire ⇄ canonical: a bare prompt, as text or as ids, that no template frames."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from branchline.chat.base import Codec
from branchline.core.call import Request
from branchline.core.errors import MessageError
from branchline.core.message import Message
from branchline.core.reader import replace_surrogates
from branchline.core.token_arrays import Ids, as_ids
from branchline.gateway.protocols.base import (
    MAX_CHOICES,
    CompletionRequest,
    RequestContext,
    WireProtocol,
    read_include_usage,
    read_model_name,
    sse_event,
)
from branchline.gateway.protocols.chat import error_body, usage
from branchline.gateway.protocols.logprobs import TextOffsets, logprob_entries
from branchline.runtime.answer import Answer, AnswerDelta
from branchline.runtime.call_record import CallRequest, CallResult
from branchline.runtime.sampling import (
    JsonObject,
    explicit_sampling,
    merge_sampling,
    read_bool,
    read_int,
    read_sampling_params,
    read_strings,
)

_MAX_LOGPROBS = 20


def read_request(body: object, caller: RequestContext) -> CompletionRequest:
    given = merge_sampling(body, caller.managed.options)
    for name, plain in (("echo", False), ("suffix", ""), ("best_of", given.get("n", 1))):
        if given.get(name, plain) != plain:
            raise MessageError(name, given[name], f"{plain!r}: nothing else is done here")
    prompt = _read_prompt(given)
    logprobs = given.get("logprobs", False)
    tops = 0 if isinstance(logprobs, bool) else read_int(given, "logprobs", 0, 0, _MAX_LOGPROBS)
    request = Request(
        (Message("user"),),
        agent=caller.agent,
        retry_count=caller.retry,
        spawned_by=caller.spawned_by,
        sampling=explicit_sampling(given, "max_tokens"),
        is_raw_prompt=True,
    )
    return CompletionRequest(
        CallRequest(
            request,
            read_sampling_params(
                given,
                "max_tokens",
                default_max_tokens=caller.default_max_tokens,
                max_tokens_limit=caller.max_tokens_limit,
            ),
            stop=read_strings(given, "stop"),
            n=read_int(given, "n", 1, 1, MAX_CHOICES),
            raw_prompt=prompt,
            stream=read_bool(given, "stream"),
        ),
        read_model_name(given),
        include_usage=read_include_usage(given),
        logprobs=logprobs is not False,
        top_logprobs=tops > 0,
        return_token_ids=read_bool(given, "return_token_ids"),
    )


def _read_prompt(given: JsonObject) -> str | Ids:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return replace_surrogates(prompt)
    if (
        isinstance(prompt, list)
        and prompt
        and all(type(token) is int and 0 <= token < 2**31 for token in prompt)
    ):
        return as_ids(prompt)
    raise MessageError("prompt", prompt, "one text that is not empty, or a list of token ids")


def build_response(ask: CompletionRequest, done: CallResult, codec: Codec) -> dict[str, Any]:
    """The whole response."""
    choices = []
    for index, answer in enumerate(done.answers):
        choice = _choice(index, answer.message.content, answer.finish_reason)
        if ask.logprobs:
            choice["logprobs"] = _logprobs(ask, answer, codec, TextOffsets())
        if ask.return_token_ids:
            choice["token_ids"] = answer.ids.tolist()
            choice["prompt_token_ids"] = done.prompt_ids.tolist()
        choices.append(choice)
    return {**_response_fields(done.call_id, ask.model), "choices": choices, "usage": usage(done)}


def _response_fields(call_id: str, model: str) -> dict[str, Any]:
    return {"id": call_id, "object": "text_completion", "created": int(time.time()), "model": model}


def _choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def _logprobs(
    ask: CompletionRequest, answer: Answer | AnswerDelta, codec: Codec, offsets: TextOffsets
) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    told = logprob_entries(answer.ids, answer.logprobs, codec, with_top_logprobs=False)
    tops = [{entry["token"]: entry["logprob"]} for entry in told]
    return {
        "tokens": [entry["token"] for entry in told],
        "token_logprobs": [entry["logprob"] for entry in told],
        "top_logprobs": tops if ask.top_logprobs else None,
        "text_offset": [offsets.advance(bytes(entry["bytes"])) for entry in told],
    }


@dataclass
class CompletionStream:
    """The events of a streamed response."""

    request: CompletionRequest
    call_id: str
    codec: Codec
    _chunk_fields: dict[str, Any] = field(init=False)
    _offsets: defaultdict[int, TextOffsets] = field(default_factory=lambda: defaultdict(TextOffsets))

    def __post_init__(self) -> None:
        self._chunk_fields = _response_fields(self.call_id, self.request.model)

    def encode_delta(self, said: AnswerDelta) -> bytes:
        choice = _choice(said.index, "".join(delta.content for delta in said.deltas), None)
        if self.request.logprobs:
            choice["logprobs"] = _logprobs(self.request, said, self.codec, self._offsets[said.index])
        if self.request.return_token_ids:
            choice["token_ids"] = said.ids.tolist()
        return sse_event({**self._chunk_fields, "choices": [choice]})

    def encode_end(self, done: CallResult) -> bytes:
        events = []
        for index, answer in enumerate(done.answers):
            choice = _choice(index, "", answer.finish_reason)
            if self.request.return_token_ids:
                choice["prompt_token_ids"] = done.prompt_ids.tolist()
            events.append(sse_event({**self._chunk_fields, "choices": [choice]}))
        if self.request.include_usage:
            events.append(sse_event({**self._chunk_fields, "choices": [], "usage": usage(done)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def encode_ping(self) -> bytes:
        return sse_event({**self._chunk_fields, "choices": [_choice(0, "", None)]})

    def encode_error(self, status: int, message: str, field_name: str | None, code: str | None) -> bytes:
        return sse_event({**error_body(status, message, field_name, code), "status": status})


COMPLETIONS = WireProtocol("completions", "cmpl-", read_request, build_response, CompletionStream, error_body)
