"""Calls and sessions in the words of OpenTelemetry's conventions for generative AI.

Plain values in, plain attributes out; nothing of OpenTelemetry is needed here. What agents and models said
is among them only where that is asked for. What the conventions have no name for begins with `branchline.`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from branchline.core.call import Request
from branchline.core.message import Message
from branchline.engines.base import SamplingParams
from branchline.gateway.calls import Done
from branchline.gateway.config import ROOM_LEFT
from branchline.gateway.live import LiveSession
from branchline.gateway.record import CallRecord

PROVIDER = "branchline"
Attribute = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes = dict[str, Attribute]

_OPERATIONS = {"completions": "text_completion"}
"""By protocol; all others are conversations."""


def call_name(record: CallRecord) -> str:
    return f"{_operation(record)} {record.model}".rstrip()


def session_name(live: LiveSession) -> str:
    return f"invoke_agent {live.options.agent}".rstrip()


def call_attributes(record: CallRecord, contents: bool = False) -> Attributes:
    """What a call's span says."""
    told: dict[str, Any] = {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.conversation.id": record.session,
        "gen_ai.agent.name": record.agent,
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.call_id,
        "http.response.status_code": record.status,
        "branchline.outcome": record.outcome,
        "branchline.protocol": record.protocol,
        "branchline.engine": record.engine,
        "branchline.group": record.group,
    }
    if record.asked is not None:
        told |= _request_attributes(record.asked.params, record.asked.choices, record.streamed)
        if contents:
            told |= _request_contents(record.asked.request, record.asked.params)
    if record.done is not None:
        told |= _done_attributes(record.done)
        if contents:
            told["gen_ai.output.messages"] = _json(
                [
                    {**_message(answer.message), "finish_reason": answer.finish}
                    for answer in record.done.answers
                ]
            )
    if record.streamed and "queue" in record.seconds:
        told["gen_ai.response.time_to_first_chunk"] = record.seconds["prepare"] + record.seconds["queue"]
    if record.failure is not None:
        told["error.type"] = record.failure.kind.partition(" ")[0]
    elif record.outcome != "ok":
        told["error.type"] = record.outcome
    return _given(told)


def session_attributes(live: LiveSession) -> Attributes:
    """What a session's span says once it is over."""
    told: dict[str, Any] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.conversation.id": live.id,
        "gen_ai.agent.name": live.options.agent,
        "branchline.group": live.options.group,
        "branchline.session.state": live.state,
        "branchline.session.reason": live.reason,
        "branchline.session.calls": len(live.session.tree.calls),
        "branchline.session.reward": live.reward,
        "branchline.session.eval": live.options.eval,
    }
    if live.state == "aborted":
        told["error.type"] = "aborted"
    return _given(told)


def phase_ends(record: CallRecord) -> Iterator[tuple[str, float, float]]:
    """Each phase a call went through: its name, when it ended (seconds since 1970), how long it took."""
    ended = record.began
    for phase, spent in record.seconds.items():
        ended += spent
        yield f"branchline.{phase}", ended, spent


def _operation(record: CallRecord) -> str:
    return _OPERATIONS.get(record.protocol, "chat")


def _request_attributes(params: SamplingParams, choices: int, streamed: bool) -> dict[str, Any]:
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.max_tokens": None if params.max_tokens == ROOM_LEFT else params.max_tokens,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": choices if choices != 1 else None,
        "gen_ai.request.stream": streamed,
    }


def _done_attributes(done: Done) -> dict[str, Any]:
    return {
        "gen_ai.response.finish_reasons": [answer.finish for answer in done.answers],
        "gen_ai.usage.input_tokens": done.prompt_tokens,
        "gen_ai.usage.output_tokens": done.sampled_tokens,
        "branchline.reused_tokens": done.reused_tokens,
        "branchline.encoded_tokens": done.call.encoded_tokens,
        "branchline.versions": done.version_range,
        "branchline.echo_equivalences": sorted({str(echo.equivalence) for echo in done.call.echoes}),
    }


def _given(told: Mapping[str, Any]) -> Attributes:
    return {name: value for name, value in told.items() if value not in ("", None, [])}


# -- contents ----------------------------------------------------------------------------------------


def _request_contents(request: Request, params: SamplingParams) -> dict[str, Any]:
    return {
        "gen_ai.input.messages": _json([_message(message) for message in request.messages]),
        "gen_ai.tool.definitions": _json([dict(tool) for tool in request.tools]) if request.tools else None,
        "gen_ai.request.stop_sequences": list(params.stop),
    }


def _message(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        parts: list[dict[str, Any]] = [
            {"type": "tool_call_response", "id": message.answers, "response": message.text}
        ]
        return {"role": "tool", "parts": parts}
    parts = [{"type": "reasoning", "content": message.reasoning}] if message.reasoning else []
    for part in message.parts or ((message.text,) if message.text else ()):
        if isinstance(part, str):
            parts.append({"type": "text", "content": part})
        else:
            # By digest: a trace is no place for pictures.
            where = {"type": "uri", "uri": part.url} if part.url else {"type": "file", "file_id": part.digest}
            parts.append({**where, "modality": part.kind, "mime_type": part.mime})
    for call in message.calls:
        parts.append(
            {"type": "tool_call", "id": call.id, "name": call.name, "arguments": _value(call.arguments)}
        )
    return {"role": message.role, "parts": parts}


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
