"""Limits of answers, and too long prompts, in every protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from branchline import ToyCodec
from branchline.core.errors import ContextLengthError
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.config import GatewayConfig
from tests.gateway.harness import Agent, agent, run
from tests.gateway.protocols.protocol_clients import PROTOCOLS, events_in, post

LONG = "y" * 5000
protocols = pytest.mark.parametrize("protocol", PROTOCOLS)


def engine(reply: str = LONG, max_context: int | None = None) -> ScriptedEngine:
    return ScriptedEngine(ToyCodec.chatml(), replies(reply), max_context=max_context, chunk_size=500)


def sampled(a: Agent) -> int:
    """The number of tokens that the last call sampled."""
    tree = a.session.managed.session.tree
    ids = tree.nodes[tree.calls[-1].outputs[0]].sampled_ids
    assert ids is not None
    return len(ids)


# -- no limit ----------------------------------------------------------------------------------------


@protocols
@pytest.mark.parametrize("stream", [False, True])
def test_answer_without_a_limit_may_fill_the_context(protocol: str, stream: bool) -> None:
    async def test() -> None:
        async with agent(engine=engine(max_context=200_000)) as a:
            assert (await post(a, protocol, "q", stream=stream)).status_code == 200
            assert sampled(a) == len(LONG) + 1
            a.engine.max_context = 1000
            await post(a, protocol, "q", stream=stream)
            assert sampled(a) == 1000 - len(a.engine.received_prompts[-1])

    run(test)


@protocols
def test_limit_is_4096_tokens_if_the_context_length_is_unknown(protocol: str) -> None:
    async def test() -> None:
        async with agent(engine=engine()) as a:
            await post(a, protocol, "q")
            assert sampled(a) == 4096

    run(test)


def test_default_max_tokens_applies_without_a_limit() -> None:
    async def test() -> None:
        config = GatewayConfig(default_max_tokens=7)
        async with agent(engine=engine(max_context=200_000), config=config) as a:
            await a.ask_text("q")
            assert sampled(a) == 7
            await a.ask_text("q", max_tokens=9)
            assert sampled(a) == 9
            assert [call.sampling["max_tokens"] for call in a.session.managed.session.tree.calls] == [7, 9]

    run(test)


def test_missing_limit_is_recorded_as_none() -> None:
    async def test() -> None:
        async with agent("x") as a:
            await a.ask_text("q")
            assert a.session.managed.session.tree.calls[0].sampling["max_tokens"] is None

    run(test)


def test_answer_without_a_limit_leaves_session_tokens_to_concurrent_calls() -> None:
    async def test() -> None:
        limits = {"tokens": 20_000}
        async with agent(engine=engine(max_context=200_000), limits=limits) as a:
            managed = a.session.managed
            managed.reserved_tokens = 8000
            await a.ask_text("q")
            assert sampled(a) == len(LONG) + 1
            managed.reserved_tokens = 20_000 - managed.sampled_tokens - 3
            assert (await a.ask("q")).json()["choices"][0]["finish_reason"] == "length"
            assert sampled(a) == 3

    run(test)


@pytest.mark.parametrize(("max_context", "count"), [(500, 8), (2048, 2)])
def test_concurrent_calls_reserve_at_most_the_context_length(max_context: int, count: int) -> None:
    async def test() -> None:
        gated = engine("hi", max_context=max_context)
        gated.gate = asyncio.Event()
        async with agent(engine=gated, limits={"tokens": 4000}) as a:
            answers = [asyncio.create_task(a.ask(f"q{number}")) for number in range(count)]
            while len(gated.received_prompts) < count:
                await asyncio.sleep(0)
            room = [max_context - len(ids) for ids in gated.received_prompts]
            assert a.session.managed.reserved_tokens == min(4000, sum(room))
            gated.gate.set()
            assert [(await task).json()["choices"][0]["finish_reason"] for task in answers] == [
                "stop"
            ] * count
            assert a.session.managed.reserved_tokens == 0

    run(test)


@protocols
def test_call_is_429_while_others_have_reserved_all_tokens(protocol: str) -> None:
    async def test() -> None:
        gated = engine("hi")
        gated.gate = asyncio.Event()
        async with agent(engine=gated, limits={"tokens": 10}) as a:
            first = asyncio.create_task(a.ask("q"))
            while not gated.received_prompts:
                await asyncio.sleep(0)
            refused = await post(a, protocol, "q")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "10 tokens" in refused.json()["error"]["message"]
            gated.gate.set()
            assert (await first).status_code == 200
            assert (await post(a, protocol, "q")).status_code == 200

    run(test)


def test_out_of_tokens_only_when_all_tokens_are_sampled() -> None:
    async def test() -> None:
        async with agent(engine=engine("hi"), limits={"tokens": 5}) as a:
            many = (await a.ask("q", n=6)).json()["error"]
            assert (many["code"], "5 are left" in many["message"]) == ("out_of_tokens", True)
            await a.ask_text("q")
            await a.ask_text("q")
            spent = (await a.ask("q")).json()["error"]
            assert (spent["code"], "has sampled them" in spent["message"]) == ("out_of_tokens", True)

    run(test)


# -- too long prompts --------------------------------------------------------------------------------

MESSAGE = "prompt is too long: {} tokens > {} maximum. This model's maximum context length is {} tokens."


@protocols
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["engine", "gateway"])
def test_too_long_prompt_has_the_message_and_code_that_make_agents_compact(
    protocol: str, stream: bool, by: str
) -> None:
    async def test() -> None:
        config = GatewayConfig(max_prompt_tokens=200 if by == "gateway" else None)
        async with agent(engine=engine(max_context=200 if by == "engine" else None), config=config) as a:
            response = await post(a, protocol, "x" * 400, stream=stream)
            problem = _error(response, in_stream=stream and protocol == "responses")
            size = int(problem["message"].split()[4])
            assert (size >= 400, problem["message"]) == (True, MESSAGE.format(size, 200, 200))
            if protocol == "messages":
                assert problem["type"] == "invalid_request_error"
            else:
                assert problem["code"] == "context_length_exceeded"
            assert not a.engine.received_prompts
            assert not a.session.managed.session.tree.calls
            refused = (await a.http.get(f"{a.gateway.url}/metrics")).text
            assert 'outcome="refused"' in refused

    run(test)


def _error(response: httpx.Response, *, in_stream: bool) -> dict[str, Any]:
    """The error. A Responses stream has it as an event, because its clients expect it there."""
    if not in_stream:
        assert response.status_code == 400
        problem: dict[str, Any] = response.json()["error"]
        return problem
    assert response.status_code == 200
    events = events_in(response.text)
    kinds = [event["type"] for event in events]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2]
    assert events[-1]["response"]["status"] == "failed"
    inside: dict[str, Any] = events[-1]["response"]["error"]
    return inside


@protocols
def test_late_context_length_error_has_the_same_code_in_the_stream(protocol: str) -> None:
    class Late(ScriptedEngine):
        async def generate(self, *args: Any, **options: Any) -> Any:
            async for chunk in super().generate(*args, **options):
                yield chunk
                raise ContextLengthError("the model's context is full")

    async def test() -> None:
        async with agent(engine=Late(ToyCodec.chatml(), replies("a long answer"))) as a:
            response = await post(a, protocol, "q", stream=True)
            assert response.status_code == 200
            last = events_in(response.text)[-1]
            problem = last["response"]["error"] if protocol == "responses" else last["error"]
            assert problem["message"] == "the model's context is full"
            if protocol != "messages":
                assert problem["code"] == "context_length_exceeded"

    run(test)


def test_session_error_has_its_kind_as_code() -> None:
    async def test() -> None:
        async with agent("x") as a:
            answered = (await a.ask("q")).json()["id"]
            again = await a.ask("q", headers={"x-branchline-resume": answered})
            assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
            await a.session.finalize()
            late = await a.ask("q")
            assert (late.status_code, late.json()["error"]["code"]) == (409, "closed")

    run(test)


def test_openai_sdk_reads_the_code() -> None:
    async def test() -> None:
        async with agent(engine=engine(max_context=50)) as a:
            sdk = openai.AsyncOpenAI(
                base_url=a.session.base_url,
                api_key=a.session.api_key,
                http_client=a.http,  # type: ignore[arg-type]
            )
            with pytest.raises(openai.BadRequestError) as refused:
                await sdk.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x" * 100}]
                )
            assert refused.value.code == "context_length_exceeded"

    run(test)
