"""OpenTelemetry: a session is one trace, its calls are the spans below the session's own.

Spans are made when what they tell of is over, with the times it had. A trace's id and its root's follow from
the session's id and the moment it was opened, so calls need not wait for the session's end and a gateway
that is started again goes on with the same trace. Spans are handed to a thread that sends them in batches:
a collector that is slow or gone costs no call anything, only its own spans.

    tracing = Tracing(provider)
    async with Gateway(engine=…, observers=[tracing.note_call], on_end=[tracing.note_end]):
        …
    tracing.close()
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

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
from branchline.gateway.otel_attributes import (
    call_attributes,
    call_span_name,
    phase_ends,
    session_attributes,
    session_span_name,
)
from branchline.runtime.call_record import CallRecord
from branchline.runtime.managed_session import ManagedSession

log = logging.getLogger("branchline.tracing")

T = TypeVar("T")

CAPTURE_CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_CAPTURE_VALUES = ("true", "span_only", "span_and_event")
FLUSH_S = 5.0
"""How long a gateway that stops waits for its last spans to be taken."""


class _RootIdGenerator(IdGenerator):
    """Random ids, except for the one root that is being made."""

    def __init__(self, otherwise: IdGenerator) -> None:
        self._fallback = otherwise
        self.root: SpanContext | None = None

    def generate_trace_id(self) -> int:
        return self._fallback.generate_trace_id() if self.root is None else self.root.trace_id

    def generate_span_id(self) -> int:
        return self._fallback.generate_span_id() if self.root is None else self.root.span_id


class Tracing:
    """Makes spans of calls and sessions, with a provider's processors and sampler."""

    def __init__(self, provider: TracerProvider, *, contents: bool = False, owned: bool = False) -> None:
        """`contents`: spans say what was said. `owned`: the provider is shut down with this."""
        tracer = provider.get_tracer("branchline")
        if not isinstance(tracer, Tracer):
            raise InputError(
                f"provider: got one that gives {type(tracer).__name__}, expected the SDK's, enabled"
            )
        self._provider = provider
        self._owned = owned
        self._contents = contents
        self._tracer = tracer
        self._ids = _RootIdGenerator(provider.id_generator)
        # Providers hand out one tracer for a name, so this one is ours.
        self._tracer.id_generator = self._ids

    @classmethod
    def from_environment(cls) -> Tracing:
        """A tracer that sends to where OpenTelemetry's own variables say."""
        resource = Resource({"service.name": "branchline"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(_exporter()))
        contents = os.environ.get(CAPTURE_CONTENT_VARIABLE, "").strip().lower() in _CAPTURE_VALUES
        return cls(provider, contents=contents, owned=True)

    def record_call(self, record: CallRecord) -> None:
        """A call that is over becomes a span below its session's."""
        _log_exceptions(self._record_call, record)

    def record_session_end(self, live: ManagedSession) -> None:
        """A session that is over becomes the root of its trace; one that did nothing leaves none."""
        _log_exceptions(self._record_session_end, live)

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Sends what is left; whether that was done in time. A provider that is not ours is left running."""
        work: Callable[[], object] = self._provider.shutdown if self._owned else self._provider.force_flush
        # Both may wait for a collector far longer than one wants to.
        thread = threading.Thread(target=work, name="branchline-last-spans", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            log.warning("spans were not taken in time and are lost", extra={"timeout_s": timeout_s})
        return not thread.is_alive()

    def _record_call(self, record: CallRecord) -> None:
        span = self._tracer.start_span(
            call_span_name(record),
            self._session_context(record.session_id, record.session_created_at),
            SpanKind.CLIENT,
            call_attributes(record, self._contents),
            _links(record.traceparent),
            _to_ns(record.started_at),
        )
        for name, ended, spent in phase_ends(record):
            span.add_event(name, {"seconds": spent}, _to_ns(ended))
        if record.outcome != "ok":
            span.set_status(Status(StatusCode.ERROR, self._description(record)))
        span.end(_to_ns(record.started_at + record.total_s))

    def _record_session_end(self, live: ManagedSession) -> None:
        if live.state == "open" and not live.session.tree.calls:
            return
        self._ids.root = _root_span(live.id, live.created_at)
        try:
            span = self._tracer.start_span(
                session_span_name(live),
                Context(),
                SpanKind.INTERNAL,
                session_attributes(live),
                start_time=_to_ns(live.created_at),
            )
        finally:
            self._ids.root = None
        if live.state == "aborted":
            span.set_status(Status(StatusCode.ERROR, live.reason or "aborted"))
        span.end(time.time_ns())

    def _session_context(self, session: str, opened: float) -> Context:
        """The context below a session's span, which may not have been made yet."""
        root = _root_span(session, opened)
        # Whether a trace is kept is decided for its root, by its id: the same for all its spans.
        kept = self._tracer.sampler.should_sample(None, root.trace_id, "").decision
        flags = TraceFlags(TraceFlags.SAMPLED if kept is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT)
        parent = SpanContext(root.trace_id, root.span_id, is_remote=True, trace_flags=flags)
        return set_span_in_context(NonRecordingSpan(parent), Context())

    def _description(self, record: CallRecord) -> str:
        failure = record.failure
        if failure is None:
            return record.outcome
        return failure.message if self._contents or not failure.may_quote_messages else failure.error_type


def _root_span(session: str, opened: float) -> SpanContext:
    digest = hashlib.sha256(f"{session} {opened!r}".encode()).digest()
    return SpanContext(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]), is_remote=False)


def _links(traceparent: str) -> list[Link]:
    """The span a client made the call in: a session is one trace, so it is linked and no parent."""
    if not traceparent:
        return []
    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
    caller = get_current_span(context).get_span_context()
    return [Link(caller)] if caller.is_valid else []


def _to_ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _log_exceptions(note: Callable[[T], None], value: T) -> None:
    try:
        note(value)
    except Exception:  # whatever is wrong with a span, the call it tells of was right
        log.exception("a span could not be made")


def _exporter() -> SpanExporter:
    protocol = os.environ.get(TRACES_PROTOCOL) or os.environ.get(PROTOCOL) or "http/protobuf"
    if protocol != "http/protobuf":
        raise InputError(f"{PROTOCOL}: got {protocol!r}, expected http/protobuf")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()
