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
from branchline.runtime.call_record import CallRecord, CallResult
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.sampling import NO_LIMIT

PROVIDER = "branchline"
Attribute = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes = dict[str, Attribute]

_OPERATIONS = {"completions": "text_completion"}
"""By protocol; all others are conversations."""


def call_span_name(record: CallRecord) -> str:
    return f"{_operation(record)} {record.model}".rstrip()


def session_span_name(live: ManagedSession) -> str:
    return f"invoke_agent {live.options.agent}".rstrip()


def call_attributes(record: CallRecord, contents: bool = False) -> Attributes:
    """What a call's span says."""
    told: dict[str, Any] = {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.conversation.id": record.session_id,
        "gen_ai.agent.name": record.agent,
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.call_id,
        "http.response.status_code": record.status,
        "branchline.outcome": record.outcome,
        "branchline.protocol": record.protocol,
        "branchline.engine": record.engine,
        "branchline.group": record.group,
    }
    if record.call_request is not None:
        told |= _request_attributes(record.call_request.params, record.call_request.n, record.streamed)
        if contents:
            told |= _request_content(record.call_request.request, record.call_request.stop)
    if record.result is not None:
        told |= _result_attributes(record.result)
        if contents:
            told["gen_ai.output.messages"] = _to_json(
                [
                    {**_message_attribute(answer.message), "finish_reason": answer.finish_reason}
                    for answer in record.result.answers
                ]
            )
    if record.streamed and "queue" in record.phase_s:
        told["gen_ai.response.time_to_first_chunk"] = record.phase_s["prepare"] + record.phase_s["queue"]
    if record.failure is not None:
        told["error.type"] = record.failure.error_type.partition(" ")[0]
    elif record.outcome != "ok":
        told["error.type"] = record.outcome
    return _drop_empty(told)


def session_attributes(live: ManagedSession) -> Attributes:
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
    return _drop_empty(told)


def phase_ends(record: CallRecord) -> Iterator[tuple[str, float, float]]:
    """Each phase a call went through: its name, when it ended (seconds since 1970), how long it took."""
    ended = record.started_at
    for phase, spent in record.phase_s.items():
        ended += spent
        yield f"branchline.{phase}", ended, spent


def _operation(record: CallRecord) -> str:
    return _OPERATIONS.get(record.protocol, "chat")


def _request_attributes(params: SamplingParams, choices: int, streamed: bool) -> dict[str, Any]:
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.max_tokens": None if params.max_tokens == NO_LIMIT else params.max_tokens,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": choices if choices != 1 else None,
        "gen_ai.request.stream": streamed,
    }


def _result_attributes(done: CallResult) -> dict[str, Any]:
    return {
        "gen_ai.response.finish_reasons": [answer.finish_reason for answer in done.answers],
        "gen_ai.usage.input_tokens": done.prompt_tokens,
        "gen_ai.usage.output_tokens": done.sampled_tokens,
        "branchline.reused_tokens": done.reused_tokens,
        "branchline.encoded_tokens": done.encoded_tokens,
        "branchline.versions": done.version_range,
        "branchline.echo_equivalences": sorted({str(equivalence) for equivalence in done.equivalences}),
    }


def _drop_empty(told: Mapping[str, Any]) -> Attributes:
    return {name: value for name, value in told.items() if value not in ("", None, [])}


# -- contents ----------------------------------------------------------------------------------------


def _request_content(request: Request, stop: Sequence[str]) -> dict[str, Any]:
    return {
        "gen_ai.input.messages": _to_json([_message_attribute(message) for message in request.messages]),
        "gen_ai.tool.definitions": _to_json([dict(tool) for tool in request.tools])
        if request.tools
        else None,
        "gen_ai.request.stop_sequences": list(stop),
    }


def _message_attribute(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        parts: list[dict[str, Any]] = [
            {"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}
        ]
        return {"role": "tool", "parts": parts}
    parts = [{"type": "reasoning", "content": message.reasoning_content}] if message.reasoning_content else []
    for part in message.parts or ((message.content,) if message.content else ()):
        if isinstance(part, str):
            parts.append({"type": "text", "content": part})
        else:
            # By digest: a trace is no place for pictures.
            where = {"type": "uri", "uri": part.url} if part.url else {"type": "file", "file_id": part.digest}
            parts.append({**where, "modality": part.kind, "mime_type": part.mime})
    for call in message.tool_calls:
        parts.append(
            {
                "type": "tool_call",
                "id": call.id,
                "name": call.name,
                "arguments": _parse_arguments(call.arguments),
            }
        )
    return {"role": message.role, "parts": parts}


def _parse_arguments(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
