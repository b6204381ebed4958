"""Text completions, wire ⇄ canonical: a bare prompt, as text or as ids, that no template frames."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from branchline.chat.base import Codec
from branchline.core.call import Request
from branchline.core.errors import MessageError
from branchline.core.fields import clean
from branchline.core.message import Message
from branchline.core.runs import Ids, as_ids
from branchline.gateway.answers import Answer, Said
from branchline.gateway.calls import Asked, Done
from branchline.gateway.protocols.base import (
    MOST_CHOICES,
    Caller,
    CompletionAsk,
    Fields,
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
from branchline.gateway.protocols.chat import error, usage
from branchline.gateway.protocols.logprobs import Offsets, entries

_MOST_LOGPROBS = 20


def read(body: object, caller: Caller) -> CompletionAsk:
    given = wishes(body, caller)
    for name, plain in (("echo", False), ("suffix", ""), ("best_of", given.get("n", 1))):
        if given.get(name, plain) != plain:
            raise MessageError(name, given[name], f"{plain!r}: nothing else is done here")
    prompt = _prompt(given)
    logprobs = given.get("logprobs", False)
    tops = 0 if isinstance(logprobs, bool) else whole_number(given, "logprobs", 0, 0, _MOST_LOGPROBS)
    request = Request(
        (Message("user"),),
        agent=caller.agent,
        retry=caller.retry,
        spawned_by=caller.spawned_by,
        sampling=given_sampling(given, "max_tokens"),
        raw=True,
    )
    return CompletionAsk(
        Asked(
            request,
            sampling_params(given, "max_tokens", caller),
            whole_number(given, "n", 1, 1, MOST_CHOICES),
            prompt=prompt,
        ),
        model_name(given),
        stream=flag(given, "stream"),
        include_usage=wants_usage(given),
        logprobs=logprobs is not False,
        top_logprobs=tops > 0,
        return_token_ids=flag(given, "return_token_ids"),
    )


def _prompt(given: Fields) -> str | Ids:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return clean(prompt)
    if (
        isinstance(prompt, list)
        and prompt
        and all(type(token) is int and 0 <= token < 2**31 for token in prompt)
    ):
        return as_ids(prompt)
    raise MessageError("prompt", prompt, "one text that is not empty, or a list of token ids")


def whole(ask: CompletionAsk, done: Done, codec: Codec) -> dict[str, Any]:
    """The whole response."""
    choices = []
    for index, answer in enumerate(done.answers):
        choice = _choice(index, answer.message.text, answer.finish)
        if ask.logprobs:
            choice["logprobs"] = _logprobs(ask, answer, codec, Offsets())
        if ask.return_token_ids:
            choice["token_ids"] = answer.ids.tolist()
            choice["prompt_token_ids"] = done.prompt_ids.tolist()
        choices.append(choice)
    return {**_frame(done.call.id, ask.model), "choices": choices, "usage": usage(done)}


def _frame(call_id: str, model: str) -> dict[str, Any]:
    return {"id": call_id, "object": "text_completion", "created": int(time.time()), "model": model}


def _choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def _logprobs(
    ask: CompletionAsk, answer: Answer | Said, codec: Codec, offsets: Offsets
) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    told = entries(answer.ids, answer.logprobs, codec, tops=False)
    tops = [{entry["token"]: entry["logprob"]} for entry in told]
    return {
        "tokens": [entry["token"] for entry in told],
        "token_logprobs": [entry["logprob"] for entry in told],
        "top_logprobs": tops if ask.top_logprobs else None,
        "text_offset": [offsets.next(bytes(entry["bytes"])) for entry in told],
    }


@dataclass
class Stream:
    """The events of a streamed response."""

    ask: CompletionAsk
    call_id: str
    codec: Codec
    _frame: dict[str, Any] = field(init=False)
    _offsets: defaultdict[int, Offsets] = field(default_factory=lambda: defaultdict(Offsets))

    def __post_init__(self) -> None:
        self._frame = _frame(self.call_id, self.ask.model)

    def said(self, said: Said) -> bytes:
        choice = _choice(said.choice, "".join(delta.text for delta in said.deltas), None)
        if self.ask.logprobs:
            choice["logprobs"] = _logprobs(self.ask, said, self.codec, self._offsets[said.choice])
        if self.ask.return_token_ids:
            choice["token_ids"] = said.ids.tolist()
        return sse({**self._frame, "choices": [choice]})

    def end(self, done: Done) -> bytes:
        events = []
        for index, answer in enumerate(done.answers):
            choice = _choice(index, "", answer.finish)
            if self.ask.return_token_ids:
                choice["prompt_token_ids"] = done.prompt_ids.tolist()
            events.append(sse({**self._frame, "choices": [choice]}))
        if self.ask.include_usage:
            events.append(sse({**self._frame, "choices": [], "usage": usage(done)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def beat(self) -> bytes:
        return sse({**self._frame, "choices": [_choice(0, "", None)]})

    def failed(self, status: int, message: str, field_name: str | None, code: str | None) -> bytes:
        return sse({**error(status, message, field_name, code), "status": status})


COMPLETIONS = Wire("completions", "cmpl-", read, whole, Stream, error)
