"""Spans of a gateway in memory, and an OTLP collector on loopback."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from branchline import ToyCodec
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.server import Gateway
from branchline.gateway.tracing import Tracing
from tests.gateway.harness import Agent
from tests.hang import HANG_S


class SpanCollector:
    """A provider that keeps its spans in memory."""

    def __init__(self, contents: bool = False, **settings: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False, **settings)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(self.provider, contents=contents)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    @property
    def calls(self) -> list[ReadableSpan]:
        return [span for span in self.spans if span.parent is not None]

    @property
    def roots(self) -> list[ReadableSpan]:
        return [span for span in self.spans if span.parent is None]

    @asynccontextmanager
    async def agent(self, *said: Any, journal: Path | None = None, **options: Any) -> AsyncIterator[Agent]:
        """A traced gateway with one session and a client for it."""
        codec = ToyCodec()
        engine = ScriptedEngine(codec, replies(*said), version=3)
        async with (
            Gateway(
                engine=engine,
                codec=codec,
                journal=journal,
                observers=[self.tracing.record_call],
                on_session_end=[self.tracing.record_session_end],
            ) as gateway,
            httpx.AsyncClient(timeout=HANG_S) as http,
        ):
            yield Agent(gateway, await gateway.session(**options), http, engine)


class OtlpReceiver:
    """A collector that takes spans over OTLP/HTTP and keeps them; runs while its block does."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.teams: set[str | None] = set()
        """Values of the header `x-team`."""
        self.resources: list[Any] = []
        self.spans: list[Any] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> OtlpReceiver:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                receiver.paths.add(self.path)
                receiver.teams.add(self.headers.get("x-team"))
                for group in request.resource_spans:
                    receiver.resources.append(group.resource)
                    receiver.spans += [span for scope in group.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing."""

        return Handler
