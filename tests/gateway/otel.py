"""A gateway whose spans can be looked at."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from branchline import ToyCodec
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.server import Gateway
from branchline.gateway.tracing import Tracing
from tests.gateway.harness import Agent


class SpanCollector:
    """A provider whose spans can be looked at."""

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
            httpx.AsyncClient(timeout=20) as http,
        ):
            yield Agent(gateway, await gateway.session(**options), http, engine)
