"""Text completions ⇄ canonical requests and answers: a prompt, as text or ids, without a chat template."""

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
    ErrorInfo,
    RequestContext,
    WireProtocol,
    read_include_usage,
    sse_event,
)
from branchline.gateway.protocols.chat import error_body, usage
from branchline.gateway.protocols.logprobs import TextOffsets, logprob_entries
from branchline.runtime.answer import Answer, AnswerDelta
from branchline.runtime.call_record import CallRequest, CallResult
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

_READ_FIELDS = READ_FIELDS["completions"]
_MAX_LOGPROBS = 20


def read_request(body: object, context: RequestContext) -> CompletionRequest:
    """Reads a body; the session's own sampling overrides the client's."""
    fields = merge_sampling(body, context.managed.options)
    assert isinstance(body, dict)
    for name, supported in (("echo", False), ("suffix", ""), ("best_of", fields.get("n", 1))):
        if fields.get(name, supported) != supported:
            raise MessageError(name, fields[name], f"{supported!r}, the only supported value")
    logprobs = fields.get("logprobs", False)
    top_logprobs = 0 if isinstance(logprobs, bool) else read_int(fields, "logprobs", 0, 0, _MAX_LOGPROBS)
    prompt = _read_prompt(fields)
    include_usage, not_applied = read_include_usage(fields)
    request = Request(
        (Message("user"),),
        agent=context.agent,
        retry_count=context.retry_count,
        spawned_by=context.spawned_by,
        sampling=explicit_sampling(fields, "max_tokens"),
        is_raw_prompt=True,
    )
    return CompletionRequest(
        CallRequest(
            request,
            read_sampling_params(fields, "max_tokens", context.default_max_tokens, context.max_tokens_limit),
            n=read_int(fields, "n", 1, 1, MAX_CHOICES),
            stream=read_bool(fields, "stream"),
            stop=read_strings(fields, "stop"),
            raw_prompt=prompt,
            not_applied=(*not_applied, *(("logprobs",) if top_logprobs else ())),
            other_fields={name: fields[name] for name in fields.keys() & body.keys() - _READ_FIELDS},
        ),
        context.model,
        include_usage=include_usage,
        logprobs=logprobs is not False,
        top_logprobs=top_logprobs > 0,
        return_token_ids=read_bool(fields, "return_token_ids"),
    )


def _read_prompt(fields: JsonObject) -> str | Ids:
    prompt = fields.get("prompt")
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
    raise MessageError("prompt", prompt, "one non-empty text, or a list of token ids")


def build_response(parsed: CompletionRequest, result: CallResult, codec: Codec) -> dict[str, Any]:
    choices = []
    for index, answer in enumerate(result.answers):
        choice = _choice(index, answer.message.content, answer.finish_reason)
        if parsed.logprobs:
            choice["logprobs"] = _logprobs(parsed, answer, codec, TextOffsets())
        if parsed.return_token_ids:
            choice["token_ids"] = answer.ids.tolist()
            choice["prompt_token_ids"] = result.prompt_ids.tolist()
        choices.append(choice)
    return {**_response_fields(result.call_id, parsed.model), "choices": choices, "usage": usage(result)}


def _response_fields(call_id: str, model: str) -> dict[str, Any]:
    return {"id": call_id, "object": "text_completion", "created": int(time.time()), "model": model}


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _logprobs(
    parsed: CompletionRequest, tokens: Answer | AnswerDelta, codec: Codec, offsets: TextOffsets
) -> dict[str, Any] | None:
    if tokens.logprobs is None:
        return None
    entries = logprob_entries(tokens.ids, tokens.logprobs, codec, with_top_logprobs=False)
    top_logprobs = [{entry["token"]: entry["logprob"]} for entry in entries]
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": top_logprobs if parsed.top_logprobs else None,
        "text_offset": [offsets.advance(bytes(entry["bytes"])) for entry in entries],
    }


@dataclass
class CompletionStream:
    """The events of a streamed response."""

    parsed: CompletionRequest
    call_id: str
    codec: Codec
    _chunk_fields: dict[str, Any] = field(init=False)
    _offsets: defaultdict[int, TextOffsets] = field(default_factory=lambda: defaultdict(TextOffsets))

    def __post_init__(self) -> None:
        self._chunk_fields = _response_fields(self.call_id, self.parsed.model)

    def encode_delta(self, delta: AnswerDelta) -> bytes:
        choice = _choice(delta.index, "".join(part.content for part in delta.deltas), None)
        if self.parsed.logprobs:
            choice["logprobs"] = _logprobs(self.parsed, delta, self.codec, self._offsets[delta.index])
        if self.parsed.return_token_ids:
            choice["token_ids"] = delta.ids.tolist()
        return sse_event({**self._chunk_fields, "choices": [choice]})

    def encode_end(self, result: CallResult) -> bytes:
        events = []
        for index, answer in enumerate(result.answers):
            choice = _choice(index, "", answer.finish_reason)
            if self.parsed.return_token_ids:
                choice["prompt_token_ids"] = result.prompt_ids.tolist()
            events.append(sse_event({**self._chunk_fields, "choices": [choice]}))
        if self.parsed.include_usage:
            events.append(sse_event({**self._chunk_fields, "choices": [], "usage": usage(result)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def encode_ping(self) -> bytes:
        return sse_event({**self._chunk_fields, "choices": [_choice(0, "", None)]})

    def encode_error(self, info: ErrorInfo) -> bytes:
        return sse_event({**error_body(info), "status": info.status})


COMPLETIONS = WireProtocol("completions", "cmpl-", read_request, build_response, CompletionStream, error_body)
