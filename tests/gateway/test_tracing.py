"""A session is one trace, its calls are spans under its root span."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from branchline import Message, ToolCall, ToyCodec
from branchline.core.errors import EngineError
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.server import Gateway
from tests.gateway.harness import run
from tests.gateway.otel import SpanCollector

SECRET = "marzipan"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
LOOK = Message("assistant", "", reasoning_content="hm", tool_calls=(ToolCall("look", '{"at": 1}', "call_1"),))


def _attributes(span: ReadableSpan | Event) -> dict[str, Any]:
    return dict(span.attributes or {})


def _times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def test_session_is_one_trace_with_its_calls_under_the_root_span() -> None:
    collector = SpanCollector()

    async def test() -> None:
        async with collector.agent("A1", "A2", agent="main", group="g7") as a:
            await a.ask_text("p")
            await a.stream("p", "A1", "x")
            await a.session.reward(0.5)
            await a.session.finalize()

    run(test)
    (root,) = collector.roots
    first, second = collector.calls
    for span in (first, second):
        assert span.context.trace_id == root.context.trace_id
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert _times(root)[0] <= _times(span)[0] <= _times(span)[1] <= _times(root)[1]
    assert first.context.span_id != second.context.span_id
    assert (root.name, root.kind, root.status.status_code) == (
        "invoke_agent main",
        SpanKind.INTERNAL,
        StatusCode.UNSET,
    )
    session = _attributes(first)["gen_ai.conversation.id"]
    assert _attributes(root) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "branchline",
        "gen_ai.conversation.id": session,
        "gen_ai.agent.name": "main",
        "branchline.group": "g7",
        "branchline.session.state": "finalized",
        "branchline.session.calls": 2,
        "branchline.session.reward": 0.5,
        "branchline.session.eval": False,
    }


def test_call_span_follows_the_genai_conventions() -> None:
    collector = SpanCollector()

    async def test() -> None:
        async with collector.agent("A1", "A2 and more", agent="main", group="g7") as a:
            await a.ask_text("p")
            await a.stream("p", " A1", "x", temperature=0.5, top_p=0.9, top_k=5, seed=7, max_tokens=2, n=2)

    run(test)
    first, span = collector.calls
    assert (span.name, span.kind, span.status.status_code) == (
        "chat toy",
        SpanKind.CLIENT,
        StatusCode.UNSET,
    )
    attributes = _attributes(span)
    assert attributes.pop("gen_ai.response.id").startswith("chatcmpl-")
    assert attributes.pop("gen_ai.conversation.id") == _attributes(first)["gen_ai.conversation.id"]
    events = {event.name: event for event in span.events}
    assert list(events) == [f"branchline.{phase}" for phase in ("prepare", "queue", "generate", "commit")]
    times = [event.timestamp for event in span.events]
    assert times == sorted(times)
    start, end = _times(span)
    assert start <= times[0]
    assert times[-1] <= end
    waited = sum(_attributes(events[f"branchline.{phase}"])["seconds"] for phase in ("prepare", "queue"))
    assert attributes.pop("gen_ai.response.time_to_first_chunk") == pytest.approx(waited)
    prompt = len("user:p\nassistant:A1user:x\nassistant:")
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "branchline",
        "gen_ai.agent.name": "main",
        "gen_ai.request.model": "toy",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": 4,
        "http.response.status_code": 200,
        "branchline.outcome": "ok",
        "branchline.protocol": "chat",
        "branchline.engine": "scripted",
        "branchline.group": "g7",
        "branchline.reused_tokens": len("user:p\nassistant:A1"),
        "branchline.encoded_tokens": prompt - len("user:p\nassistant:A1"),
        "branchline.versions": (3, 3),
        "branchline.echo_equivalences": ("trimmed_whitespace",),
    }


def test_raw_prompt_is_a_text_completion() -> None:
    collector = SpanCollector()

    async def test() -> None:
        async with collector.agent("A1") as a:
            body = {"prompt": "once", "model": "toy"}
            answer = await a.http.post(f"{a.session.base_url}/completions", json=body, headers=a.api_headers)
            assert answer.status_code == 200

    run(test)
    (span,) = collector.calls
    assert span.name == "text_completion toy"
    assert _attributes(span)["gen_ai.operation.name"] == "text_completion"


@pytest.mark.parametrize("contents", [False, True])
def test_failed_call_has_the_error_type_and_quotes_only_with_contents(contents: bool) -> None:
    collector = SpanCollector(contents)

    async def test() -> None:
        async with collector.agent(EngineError(f"no {SECRET}")) as a:
            assert (await a.ask("p")).status_code == 502
            assert (await a.ask("p", temperature=SECRET)).status_code == 400
            await a.session.abort("no use")

    run(test)
    failed, refused = collector.calls
    assert _attributes(failed)["error.type"] == "EngineError"
    assert _attributes(failed)["branchline.outcome"] == "failed"
    assert _attributes(failed)["http.response.status_code"] == 502
    assert "gen_ai.usage.input_tokens" not in _attributes(failed)
    assert _attributes(refused)["error.type"] == "MessageError"
    assert refused.name == "chat"
    for span, message in ((failed, f"no {SECRET}"), (refused, f"temperature: got '{SECRET}'")):
        assert span.status.status_code is StatusCode.ERROR
        assert (message in str(span.status.description)) == contents
    (root,) = collector.roots
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "no use")
    assert _attributes(root)["error.type"] == "aborted"


def test_spans_contain_no_messages_by_default() -> None:
    collector = SpanCollector()

    async def test() -> None:
        async with collector.agent(SECRET, EngineError(SECRET), metadata={"about": SECRET}) as a:
            await a.ask(SECRET, tools=TOOLS, stop=[SECRET])
            await a.ask(SECRET, SECRET, SECRET)
            await a.ask({"role": SECRET})
            await a.session.finalize()

    run(test)
    assert len(collector.spans) == 4
    for span in collector.spans:
        assert SECRET not in span.to_json()


def test_messages_follow_the_conventions_with_contents() -> None:
    collector = SpanCollector(contents=True)

    async def test() -> None:
        async with collector.agent(LOOK, "done") as a:
            picture = {"type": "image_url", "image_url": {"url": "https://host/a.png"}}
            user = {"role": "user", "content": [{"type": "text", "text": "see"}, picture]}
            answer = (await a.ask(user, tools=TOOLS, stop=["END"])).json()["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "a door"}
            await a.ask_text(user, answer, result, tools=TOOLS)

    run(test)
    first, second = (_attributes(span) for span in collector.calls)
    assert json.loads(first["gen_ai.tool.definitions"]) == TOOLS
    assert first["gen_ai.request.stop_sequences"] == ("END",)
    see, tool = json.loads(second["gen_ai.input.messages"])[0], json.loads(second["gen_ai.input.messages"])[2]
    assert see["role"] == "user"
    assert see["parts"][0] == {"type": "text", "content": "see"}
    assert see["parts"][1]["type"] == "uri"
    assert see["parts"][1]["uri"] == "https://host/a.png"
    (called,) = json.loads(first["gen_ai.output.messages"])
    assert called["role"] == "assistant"
    assert called["finish_reason"] == "tool_calls"
    assert called["parts"][0] == {"type": "reasoning", "content": "hm"}
    (part,) = called["parts"][1:]
    assert (part["type"], part["name"], part["arguments"]) == ("tool_call", "look", {"at": 1})
    assert tool == {
        "role": "tool",
        "parts": [{"type": "tool_call_response", "id": part["id"], "response": "a door"}],
    }
    assert json.loads(second["gen_ai.output.messages"])[0]["parts"] == [{"type": "text", "content": "done"}]


def test_client_span_is_linked() -> None:
    collector = SpanCollector()

    async def test() -> None:
        async with collector.agent("A1") as a:
            for value in ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "nonsense", ""):
                await a.ask("p", headers={"traceparent": value})

    run(test)
    linked, *others = collector.calls
    (link,) = linked.links
    assert link.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert link.context.span_id == 0xB7AD6B7169203331
    assert linked.context.trace_id != link.context.trace_id, "a session stays one trace"
    assert [list(span.links) for span in others] == [[], []]


# -- sessions ----------------------------------------------------------------------------------------


def test_restarted_gateway_continues_the_same_trace(tmp_path: Path) -> None:
    before, after = SpanCollector(), SpanCollector()

    async def test() -> None:
        async with before.agent("A1", journal=tmp_path / "j", id="s1") as a:
            await a.ask_text("p")
            key = a.session.api_key
        codec = ToyCodec()
        async with (
            Gateway(
                engine=ScriptedEngine(codec, replies("A2")),
                codec=codec,
                journal=tmp_path / "j",
                observers=[after.tracing.record_call],
                on_session_end=[after.tracing.record_session_end],
            ) as gateway,
            httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as http,
        ):
            body = {"messages": [{"role": "user", "content": "q"}]}
            await http.post(f"{gateway.url}/v1/chat/completions", json=body)
            await gateway.sessions.end_session(gateway.sessions.get("s1"), "finalized")

    run(test)
    assert not before.roots, "a session in a journal is not over"
    (root,), (first,), (second,) = after.roots, before.calls, after.calls
    assert first.context.trace_id == second.context.trace_id == root.context.trace_id
    assert first.parent is not None
    assert second.parent is not None
    assert first.parent.span_id == second.parent.span_id == root.context.span_id
    assert _times(root)[0] <= _times(first)[0]


def test_sessions_without_a_journal_end_with_the_gateway() -> None:
    collector = SpanCollector()

    async def test() -> None:
        async with collector.agent("A1") as a:
            await a.ask_text("p")
            await a.gateway.session(id="idle")

    run(test)
    (root,) = collector.roots
    assert _attributes(root)["branchline.session.state"] == "open"
    assert root.context.trace_id == collector.calls[0].context.trace_id


def test_same_session_id_in_another_gateway_is_another_trace() -> None:
    collector = SpanCollector()

    async def test() -> None:
        for _ in range(2):
            async with collector.agent("A1", id="default") as a:
                await a.ask_text("p")

    run(test)
    assert len({span.context.trace_id for span in collector.roots}) == 2
    assert len({span.context.trace_id for span in collector.spans}) == 2


@pytest.mark.parametrize(("ratio", "min_count", "max_count"), [(0.0, 0, 0), (0.5, 1, 9), (1.0, 10, 10)])
def test_sampler_keeps_all_spans_of_a_session_or_none(ratio: float, min_count: int, max_count: int) -> None:
    collector = SpanCollector(sampler=ParentBased(TraceIdRatioBased(ratio)))

    async def test() -> None:
        async with collector.agent("A1") as a:
            for number in range(10):
                session = await a.gateway.session(id=f"s{number}")
                # The trace id depends on it: with fixed times the same sessions are kept every time.
                session.managed.created_at = float(number)
                one = replace(a, session=session)
                await one.ask_text("p")
                await one.ask_text("p")

    run(test)
    traces = [span.context.trace_id for span in collector.spans]
    assert min_count <= len(set(traces)) <= max_count
    assert all(traces.count(trace) == 3 for trace in traces)
