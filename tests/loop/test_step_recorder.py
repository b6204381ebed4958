"""Traces of agent loops: calls, tools and interactions, in process and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from branchline import SessionModel
from branchline.core.errors import EngineError
from branchline.gateway.tracing import Tracing
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.interaction import InteractionConfig
from branchline.loop.state import LoopState
from branchline.loop.timeouts import CancelToken
from branchline.loop.tools.base import ToolSelection
from tests.loop.harness import (
    LoopHarness,
    LoopScript,
    ScriptedToolCall,
    ScriptedTurn,
    loop_harness,
    run,
)

SCRIPT = LoopScript(
    (
        ScriptedTurn("look", tool_calls=(ScriptedToolCall(), ScriptedToolCall(result="no", fails=True))),
        ScriptedTurn("end"),
    ),
    user_messages=(),
)


class Spans:
    """Collects the spans of a Tracing."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)

    @property
    def finished(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return sorted(span.name for span in self.finished)


async def run_traced(
    s: LoopHarness, spans: Spans, model: Any, cancel: CancelToken | None = None
) -> LoopState:
    async with AgentLoop(
        model,
        LoopState.begin(s.task(), "t"),
        tools=ToolSelection((s.tool,)),
        interaction=InteractionConfig(s.user),
        observers=[spans.tracing.record_step],
    ) as loop:
        return await loop.run(cancel)


@pytest.mark.parametrize("over_http", [False, True])
def test_tools_and_interactions_have_spans_in_the_trace_of_their_session(over_http: bool) -> None:
    async def test() -> None:
        spans = Spans()
        async with loop_harness(SCRIPT, over_http=over_http) as s:
            model: Any = s.model
            if not over_http:
                model = SessionModel(s.managed, s.engine, observers=[spans.tracing.record_call])
            state = await run_traced(s, spans, model)
            tools = ["execute_tool act"] * 2
            users = ["interaction_respond user", "interaction_score user", "interaction_start user"]
            assert spans.names == sorted([*tools, *users, *(["chat"] * 2 if not over_http else [])])
            spans.tracing.record_session_end(s.managed)
            root = spans.finished[-1]
            assert root.context is not None
            for span in spans.finished[:-1]:
                assert span.context is not None
                assert span.parent is not None
                assert (span.context.trace_id, span.parent.span_id) == (
                    root.context.trace_id,
                    root.context.span_id,
                )
            executed = [dict(span.attributes or {}) for span in spans.finished if "execute" in span.name]
            assert sorted(str(one.get("error.type")) for one in executed) == ["None", "ValueError"]
            assert {one["gen_ai.tool.call.id"] for one in executed} == {
                result.tool_call_id for result in state.tool_results
            }

    run(test)


def test_calls_in_process_that_fail_or_are_cancelled_are_observed() -> None:
    async def test() -> None:
        outcomes: list[Any] = []
        script = LoopScript((ScriptedTurn("end", cancel_points=(2,)),))
        async with loop_harness(script) as s:

            def observe(record: Any) -> None:
                outcomes.append((record.outcome, record.failure and record.failure.error_type))

            model = SessionModel(s.managed, s.engine, observers=[observe])
            cancel = CancelToken()
            task = asyncio.create_task(run_traced(s, Spans(), model, cancel))
            await s.engine.at_cancel_point.wait()
            cancel.cancel()
            await task
            s.engine.failure = EngineError("gone")
            with pytest.raises(EngineError):
                await run_traced(s, Spans(), model)
            assert outcomes == [("cancelled", None), ("failed", "EngineError")]

    run(test)
