"""Calls to an upstream keep the session's limits, and their record says that it is not exact."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from branchline import ExportPolicy, Message, Request, ToyCodec, export_samples
from branchline.core.errors import EngineError, EngineInputError, SessionError
from branchline.engines.base import SamplingParams
from branchline.engines.upstream_chat import UpstreamChat
from branchline.runtime.answer import AnswerDelta
from branchline.runtime.call_record import CallRecord, CallRequest, CallResult, new_call_id
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.sampling import NO_LIMIT
from branchline.runtime.upstream import run_upstream_call
from tests.engines.fake_servers import FakeChat
from tests.engines.test_upstream_chat import SCRIPT, chat_event
from tests.gateway.harness import run
from tests.runtime.harness import call_request, open_session

ANSWER = "fine"
TEXT = (chat_event(content=ANSWER), chat_event("stop"))
TOKENS = len(ToyCodec.chatml().encode(ANSWER)) + 1
"""The tokens that the answer counts for, with its stop id."""
UNLIMITED = SamplingParams(max_tokens=NO_LIMIT)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
SEARCH = {"type": "web_search"}


@dataclass
class Caller:
    """One session whose calls go to a fake upstream."""

    server: FakeChat
    upstream: UpstreamChat
    managed: ManagedSession
    deltas: list[AnswerDelta] = field(default_factory=list)
    """The deltas of the last call."""

    async def call(self, request: CallRequest | None = None) -> CallResult:
        record = CallRecord(self.managed.id, "test", new_call_id(self.managed), model="large")
        self.deltas = []
        request = request or call_request(params=UNLIMITED)
        async for event in run_upstream_call(self.managed, self.upstream, request, record):
            if isinstance(event, AnswerDelta):
                self.deltas.append(event)
        assert record.result is not None
        return record.result

    async def refusal(self) -> str:
        with pytest.raises(SessionError) as refused:
            await self.call()
        return refused.value.kind

    @property
    def sent_limits(self) -> list[dict[str, Any]]:
        names = ("max_tokens", "max_completion_tokens")
        return [{name: body[name] for name in names if name in body} for body in self.server.bodies]


@asynccontextmanager
async def _caller(*script: dict[str, Any], **options: Any) -> AsyncIterator[Caller]:
    async with FakeChat() as server:
        server.scripted_events = script or TEXT
        upstream = UpstreamChat(server.url + "/v1")
        yield Caller(server, upstream, open_session(**options))
        await upstream.close()


def test_text_reasoning_and_tool_calls_reach_the_caller_and_the_tree() -> None:
    async def test() -> None:
        async with _caller(*SCRIPT) as c:
            result = await c.call()
            parts = [part for delta in c.deltas for part in delta.deltas]
            assert "".join(part.content for part in parts) == result.message.content == "héllo"
            assert "".join(part.reasoning_content for part in parts) == "hm"
            calls = [(call.id, call.arguments) for call in result.message.tool_calls]
            assert calls == [("c1", '{"a": 1}'), ("c2", "{}")]
            assert [part.tool_call for part in parts if part.tool_call] == [*result.message.tool_calls]
            assert (result.finish_reason, result.prompt_tokens, result.sampled_tokens) == ("tool_calls", 7, 3)
            assert result.version_range is None
            assert c.server.bodies[0]["model"] == "large"
            assert c.managed.session.tree.nodes[-1].message == result.message

    run(test)


def test_a_recorded_conversation_is_one_timeline_that_is_trained_only_when_asked_for() -> None:
    async def test() -> None:
        async with _caller() as c:
            await c.call()
            later = (Message("assistant", ANSWER), Message("user", "q"))
            request = call_request("p", *later, params=UNLIMITED)
            await c.call(replace(request, request=replace(request.request, sampling={"temperature": 0.5})))
            export = c.managed.export()
            assert not export.samples
            assert {str(drop.reason) for drop in export.report.dropped} == {"inexact"}
            policy = ExportPolicy(include_inexact=True, include_missing_logprobs=True)
            (sample,) = export_samples(c.managed.session.tree, policy).samples
            assert (sample.exact, sample.inexact_tokens) == (False, 2 * TOKENS)
            # Only fields that were set are sent: the upstream has defaults of its own.
            first, second = c.server.bodies
            assert not {"temperature", "max_tokens"} & first.keys()
            assert second["temperature"] == 0.5

    run(test)


def test_what_an_upstream_cannot_do_is_refused_and_a_failure_leaves_nothing() -> None:
    async def test() -> None:
        async with _caller() as c:
            with pytest.raises(EngineInputError, match="one chat completion at a time"):
                await c.call(call_request(n=2))
            raw = CallRequest(Request((Message("user", "p"),), is_raw_prompt=True), UNLIMITED, raw_prompt="p")
            with pytest.raises(EngineInputError, match="one chat completion at a time"):
                await c.call(raw)
            with pytest.raises(SessionError, match="no ids to resume from"):
                await c.call(call_request(resume_call_id="call-0"))
            c.server.refusal = (500, b"down")
            with pytest.raises(EngineError, match="down"):
                await c.call()
            assert not c.managed.session.tree.calls
            assert c.managed.in_flight == 0

    run(test)


def _call_event(id: str | None, arguments: str) -> dict[str, Any]:
    return chat_event(tool_calls=[{"id": id, "function": {"name": "look", "arguments": arguments}}])


def test_tool_calls_without_ids_get_some() -> None:
    async def test() -> None:
        script = (_call_event("", '{"a":1}'), _call_event(None, '{"b":2}'), chat_event("stop"))
        async with _caller(*script) as c:
            calls = (await c.call()).message.tool_calls
            assert [call.arguments for call in calls] == ['{"a":1}', '{"b":2}']
            assert all(call.id.startswith("call_") for call in calls)
            assert calls[0].id != calls[1].id
            assert c.managed.session.tree.nodes[-1].message.tool_calls == calls

    run(test)


@pytest.mark.parametrize(
    ("upstream", "expected"),
    [
        *((word, "tool_calls") for word in ("stop", "tool_calls", "tool_use", "function_call", "end_turn")),
        *((word, word) for word in ("length", "content_filter")),
    ],
)
def test_an_answer_with_tool_calls_waits_for_them_unless_it_is_incomplete(
    upstream: str, expected: str
) -> None:
    async def test() -> None:
        async with _caller(_call_event("c1", "{}"), chat_event(upstream)) as c:
            assert (await c.call()).finish_reason == expected

    run(test)


def test_both_token_counts_are_the_upstreams_or_both_ours() -> None:
    async def test() -> None:
        async with _caller() as c:
            result = await c.call()
            assert (result.prompt_tokens, result.sampled_tokens) == (len(result.prompt_ids), TOKENS)
            c.server.scripted_events = (
                *TEXT,
                {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 222}},
            )
            result = await c.call()
            assert (result.prompt_tokens, result.sampled_tokens) == (11, 222)

    run(test)


# -- the fields of the request -----------------------------------------------------------------------


def test_without_tools_an_upstream_gets_no_fields_about_them() -> None:
    async def test() -> None:
        async with _caller() as c:
            request = call_request(params=UNLIMITED, tool_choice="required", single_tool_call=True)
            await c.call(request)
            await c.call(replace(request, request=replace(request.request, tools=(TOOL,))))
            without, with_tools = c.server.bodies
            assert not {"tools", "tool_choice", "parallel_tool_calls"} & without.keys()
            assert (with_tools["tools"], with_tools["tool_choice"]) == ([TOOL], "required")
            assert with_tools["parallel_tool_calls"] is False

    run(test)


def test_forwarded_options_replace_those_made_from_the_parameters() -> None:
    async def test() -> None:
        async with _caller() as c:
            options = {"provider": {"order": ["a"]}, "tools": [SEARCH], "model": "ignored"}
            request = call_request(params=UNLIMITED, stop=("END",))
            await c.call(request)
            await c.call(replace(request, upstream_options=options))
            made, forwarded = c.server.bodies
            assert made["stop"] == ["END"]
            assert "stop" not in forwarded
            assert (forwarded["provider"], forwarded["tools"]) == ({"order": ["a"]}, [SEARCH])
            assert forwarded["model"] == "large"

    run(test)


@pytest.mark.parametrize(
    ("limit", "max_tokens", "options", "sent"),
    [
        (None, NO_LIMIT, None, {}),
        (None, 10, None, {"max_tokens": 10}),
        (None, 10, {"max_completion_tokens": 30}, {"max_completion_tokens": 10}),
        (7, NO_LIMIT, None, {"max_tokens": 7}),
        (7, 9, {"max_completion_tokens": 9}, {"max_completion_tokens": 7}),
        (70, 9, {"max_tokens": 9}, {"max_tokens": 9}),
        (10**6, NO_LIMIT, None, {"max_tokens": 4096}),
    ],
)
def test_an_upstream_gets_the_smallest_limit_under_the_name_in_use(
    limit: int | None, max_tokens: int, options: dict[str, Any] | None, sent: dict[str, int]
) -> None:
    async def test() -> None:
        async with _caller(limits={"tokens": limit}) as c:
            params = SamplingParams(max_tokens=max_tokens)
            await c.call(call_request(params=params, upstream_options=options))
            assert c.sent_limits == [sent]

    run(test)


# -- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "kind"), [({"calls": 1}, "out_of_calls"), ({"tokens": TOKENS}, "out_of_tokens")]
)
def test_a_session_at_its_limit_sends_nothing_to_the_upstream(limits: dict[str, int], kind: str) -> None:
    async def test() -> None:
        async with _caller(limits=limits) as c:
            await c.call()
            assert await c.refusal() == kind
            assert len(c.server.bodies) == 1

    run(test)


def test_concurrent_calls_share_the_tokens_that_are_left() -> None:
    async def test() -> None:
        async with _caller(limits={"tokens": 12, "calls": 3}) as c:
            c.server.hold_after = 0
            request = call_request(params=SamplingParams(max_tokens=9))
            first = asyncio.create_task(c.call(request))
            await c.server.is_held.wait()
            second = asyncio.create_task(replace(c, deltas=[]).call(request))
            while len(c.server.bodies) < 2:
                await asyncio.sleep(0)
            assert await c.refusal() == "busy"
            assert (c.managed.in_flight, c.managed.reserved_tokens) == (2, 12)
            c.server.proceed.set()
            await asyncio.gather(first, second)
            assert c.sent_limits == [{"max_tokens": 9}, {"max_tokens": 3}]
            assert (c.managed.in_flight, c.managed.reserved_tokens) == (0, 0)

    run(test)


def test_a_failed_call_returns_what_it_had_reserved() -> None:
    async def test() -> None:
        async with _caller(limits={"tokens": 12, "calls": 1}) as c:
            c.server.refusal = (500, b"down")
            with pytest.raises(EngineError):
                await c.call()
            c.server.refusal = None
            assert (await c.call()).message.content == ANSWER

    run(test)
