"""OpenTelemetry traces: a session is one trace, its calls are spans under the session's root span.

Spans are created when their call or session is over, with the times it had. The ids of a trace and of its
root span follow from the session's id and opening time, so calls need not wait for the session's end, and a
restarted gateway continues the same trace. A background thread sends the spans in batches: a slow or missing
collector delays no call and loses only spans.

Attributes follow OpenTelemetry's conventions for generative AI; others begin with `branchline.`. Message
contents are among them only if they were enabled.

    tracing = Tracing(provider)
    async with Gateway(
        engine=…, observers=[tracing.record_call], on_session_end=[tracing.record_session_end]
    ):
        …
    tracing.close()

An agent loop in the same program is traced too: `SessionModel(…, observers=[tracing.record_call])` for its
calls, `AgentContext(…, observers=(tracing.record_step,))` for its tools and interactions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_PROTOCOL as PROTOCOL
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_TRACES_PROTOCOL as TRACES_PROTOCOL
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Tracer, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.runtime.call_record import CallRecord, CallRequest, CallResult, StepRecord
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.sampling import NO_LIMIT

log = logging.getLogger("branchline.tracing")

Value = TypeVar("Value")
Attribute = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes = dict[str, Attribute]

CAPTURE_CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_CAPTURE_VALUES = ("true", "span_only", "span_and_event")
_PROVIDER = "branchline"
FLUSH_S = 5.0
"""How long a stopping gateway waits for its last spans to be sent."""


class _RootIdGenerator(IdGenerator):
    """Random ids, except for the root span that is being created."""

    def __init__(self, fallback: IdGenerator) -> None:
        self._fallback = fallback
        self.root: SpanContext | None = None

    def generate_trace_id(self) -> int:
        return self._fallback.generate_trace_id() if self.root is None else self.root.trace_id

    def generate_span_id(self) -> int:
        return self._fallback.generate_span_id() if self.root is None else self.root.span_id


class Tracing:
    """Creates spans of calls and sessions with a provider's processors and sampler."""

    def __init__(self, provider: TracerProvider, *, contents: bool = False, owned: bool = False) -> None:
        """`contents`: spans contain the messages. `owned`: `close` shuts the provider down."""
        tracer = provider.get_tracer("branchline")
        if not isinstance(tracer, Tracer):
            raise InputError(
                f"provider: got one that returns {type(tracer).__name__}, expected the SDK's, enabled"
            )
        self._provider = provider
        self._owned = owned
        self._contents = contents
        self._tracer = tracer
        self._ids = _RootIdGenerator(provider.id_generator)
        # A provider returns one tracer per name, so no other code uses this one.
        self._tracer.id_generator = self._ids

    @classmethod
    def from_environment(cls) -> Tracing:
        """A tracing that sends to the collector named by OpenTelemetry's own variables."""
        resource = Resource({"service.name": "branchline"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(_exporter()))
        contents = os.environ.get(CAPTURE_CONTENT_VARIABLE, "").strip().lower() in _CAPTURE_VALUES
        return cls(provider, contents=contents, owned=True)

    def record_call(self, record: CallRecord) -> None:
        """Creates the span of a finished call, under its session's root span."""
        _log_exceptions(self._record_call, record)

    def record_step(self, record: StepRecord) -> None:
        """Creates the span of a tool's or an interaction's call, under its session's root span."""
        _log_exceptions(self._record_step, record)

    def record_session_end(self, managed: ManagedSession) -> None:
        """Creates the root span of a session; an open session without calls gets none."""
        _log_exceptions(self._record_session_end, managed)

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Sends the remaining spans; returns whether that finished in time. Shuts down an owned provider."""
        work: Callable[[], object] = self._provider.shutdown if self._owned else self._provider.force_flush
        # Both may wait for a collector much longer than the timeout.
        thread = threading.Thread(target=work, name="branchline-last-spans", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            log.warning("spans were not sent in time and are lost", extra={"timeout_s": timeout_s})
        return not thread.is_alive()

    def _record_call(self, record: CallRecord) -> None:
        span = self._tracer.start_span(
            f"{_operation(record)} {record.model}".rstrip(),
            self._session_context(record.session_id, record.session_created_at),
            SpanKind.CLIENT,
            call_attributes(record, self._contents),
            _links(record.traceparent),
            _to_ns(record.started_at),
        )
        for name, ended, spent in _phase_ends(record):
            span.add_event(name, {"seconds": spent}, _to_ns(ended))
        if record.outcome != "ok":
            span.set_status(Status(StatusCode.ERROR, self._description(record)))
        span.end(_to_ns(record.started_at + record.total_s))

    def _record_step(self, record: StepRecord) -> None:
        attributes = step_attributes(record)
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {record.name}",
            self._session_context(record.session_id, record.session_created_at),
            SpanKind.INTERNAL,
            attributes,
            start_time=_to_ns(record.started_at),
        )
        if record.error_type:
            span.set_status(Status(StatusCode.ERROR, record.error_type))
        span.end(_to_ns(record.started_at + record.total_s))

    def _record_session_end(self, managed: ManagedSession) -> None:
        if managed.state == "open" and not managed.session.tree.calls:
            return
        self._ids.root = _root_span(managed.id, managed.created_at)
        try:
            span = self._tracer.start_span(
                f"invoke_agent {managed.options.agent}".rstrip(),
                Context(),
                SpanKind.INTERNAL,
                session_attributes(managed),
                start_time=_to_ns(managed.created_at),
            )
        finally:
            self._ids.root = None
        if managed.state == "aborted":
            span.set_status(Status(StatusCode.ERROR, managed.reason or "aborted"))
        span.end(time.time_ns())

    def _session_context(self, session_id: str, created_at: float) -> Context:
        """The context under a session's root span, which may not have been created yet."""
        root = _root_span(session_id, created_at)
        # The sampler decides by the trace id of the root: the same for all spans of the trace.
        decision = self._tracer.sampler.should_sample(None, root.trace_id, "").decision
        is_sampled = decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
        parent = SpanContext(root.trace_id, root.span_id, is_remote=True, trace_flags=flags)
        return set_span_in_context(NonRecordingSpan(parent), Context())

    def _description(self, record: CallRecord) -> str:
        failure = record.failure
        if failure is None:
            return record.outcome
        return failure.message if self._contents or not failure.may_quote_messages else failure.error_type


def _root_span(session_id: str, created_at: float) -> SpanContext:
    digest = hashlib.sha256(f"{session_id} {created_at!r}".encode()).digest()
    return SpanContext(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]), is_remote=False)


def _links(traceparent: str) -> list[Link]:
    """A link to the client's own span; it is not the parent, because a session is one trace."""
    if not traceparent:
        return []
    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
    client = get_current_span(context).get_span_context()
    return [Link(client)] if client.is_valid else []


def _phase_ends(record: CallRecord) -> Iterator[tuple[str, float, float]]:
    """For each phase of a call: its name, when it ended (seconds since 1970), how long it took."""
    ended = record.started_at
    for phase, spent in record.phase_s.items():
        ended += spent
        yield f"branchline.{phase}", ended, spent


def _to_ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _log_exceptions(function: Callable[[Value], None], value: Value) -> None:
    try:
        function(value)
    except Exception:  # a span that fails must not fail its call
        log.exception("a span could not be made")


def _exporter() -> SpanExporter:
    protocol = os.environ.get(TRACES_PROTOCOL) or os.environ.get(PROTOCOL) or "http/protobuf"
    if protocol != "http/protobuf":
        raise InputError(f"{PROTOCOL}: got {protocol!r}, expected http/protobuf")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


# -- attributes --------------------------------------------------------------------------------------


def call_attributes(record: CallRecord, contents: bool = False) -> Attributes:
    """The attributes of a call's span."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.conversation.id": record.session_id,
        "gen_ai.agent.name": record.agent,
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.call_id,
        # 0 for a call in process.
        "http.response.status_code": record.status or None,
        "branchline.outcome": record.outcome,
        "branchline.protocol": record.protocol,
        "branchline.engine": record.engine,
        "branchline.group": record.group,
    }
    if record.call_request is not None:
        attributes |= _request_attributes(record.call_request)
        if contents:
            attributes |= _request_contents(record.call_request)
    if record.result is not None:
        attributes |= _result_attributes(record.result)
        if contents:
            attributes["gen_ai.output.messages"] = _to_json(
                [
                    {**_message_attribute(answer.message), "finish_reason": answer.finish_reason}
                    for answer in record.result.answers
                ]
            )
    if record.streamed and "queue" in record.phase_s:
        attributes["gen_ai.response.time_to_first_chunk"] = (
            record.phase_s["prepare"] + record.phase_s["queue"]
        )
    if record.failure is not None:
        attributes["error.type"] = record.failure.error_type.partition(" ")[0]
    elif record.outcome != "ok":
        attributes["error.type"] = record.outcome
    return _drop_empty(attributes)


def step_attributes(record: StepRecord) -> Attributes:
    """The attributes of the span of a tool's or an interaction's call."""
    is_tool = record.kind == "tool"
    return _drop_empty(
        {
            "gen_ai.operation.name": "execute_tool" if is_tool else f"interaction_{record.operation}",
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.conversation.id": record.session_id,
            "gen_ai.tool.name" if is_tool else "branchline.interaction.name": record.name,
            "gen_ai.tool.call.id": record.tool_call_id,
            "error.type": record.error_type,
        }
    )


def session_attributes(managed: ManagedSession) -> Attributes:
    """The attributes of an ended session's root span."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.conversation.id": managed.id,
        "gen_ai.agent.name": managed.options.agent,
        "branchline.group": managed.options.group,
        "branchline.session.state": managed.state,
        "branchline.session.reason": managed.reason,
        "branchline.session.calls": len(managed.session.tree.calls),
        "branchline.session.reward": managed.reward,
        "branchline.session.eval": managed.options.eval,
    }
    if managed.state == "aborted":
        attributes["error.type"] = "aborted"
    return _drop_empty(attributes)


def _operation(record: CallRecord) -> str:
    return "text_completion" if record.protocol == "completions" else "chat"


def _request_attributes(call_request: CallRequest) -> dict[str, Any]:
    params = call_request.params
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.max_tokens": None if params.max_tokens == NO_LIMIT else params.max_tokens,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": call_request.n if call_request.n != 1 else None,
        "gen_ai.request.stream": call_request.stream,
    }


def _result_attributes(result: CallResult) -> dict[str, Any]:
    return {
        "gen_ai.response.finish_reasons": [answer.finish_reason for answer in result.answers],
        "gen_ai.usage.input_tokens": result.prompt_tokens,
        "gen_ai.usage.output_tokens": result.sampled_tokens,
        "branchline.reused_tokens": result.reused_tokens,
        "branchline.encoded_tokens": result.encoded_tokens,
        "branchline.versions": result.version_range,
        "branchline.echo_equivalences": sorted({str(equivalence) for equivalence in result.equivalences}),
    }


def _drop_empty(attributes: Mapping[str, Any]) -> Attributes:
    return {name: value for name, value in attributes.items() if value not in ("", None, [])}


def _request_contents(call_request: CallRequest) -> dict[str, Any]:
    request = call_request.request
    tools = [dict(tool) for tool in request.tools]
    return {
        "gen_ai.input.messages": _to_json([_message_attribute(message) for message in request.messages]),
        "gen_ai.tool.definitions": _to_json(tools) if tools else None,
        "gen_ai.request.stop_sequences": list(call_request.stop),
    }


def _message_attribute(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        response = {"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}
        return {"role": "tool", "parts": [response]}
    parts: list[dict[str, Any]] = []
    if message.reasoning_content:
        parts.append({"type": "reasoning", "content": message.reasoning_content})
    for part in message.parts or ((message.content,) if message.content else ()):
        if isinstance(part, str):
            parts.append({"type": "text", "content": part})
        else:
            # By digest: payloads are too large for a trace.
            source = (
                {"type": "uri", "uri": part.url} if part.url else {"type": "file", "file_id": part.digest}
            )
            parts.append({**source, "modality": part.kind, "mime_type": part.mime})
    for call in message.tool_calls:
        arguments = _parse_arguments(call.arguments)
        parts.append({"type": "tool_call", "id": call.id, "name": call.name, "arguments": arguments})
    return {"role": message.role, "parts": parts}


def _parse_arguments(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
