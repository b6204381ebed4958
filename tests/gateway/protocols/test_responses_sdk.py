"""The `openai` SDK drives the Responses protocol: whole, streamed, its stream helper, its own parsing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseCustomToolCall, ResponseReasoningItem

from branchline import Message, ToolCall, ToyCodec
from tests.gateway.harness import Agent, agent, run
from tests.gateway.protocols.protocol_clients import QUESTIONS, REPLIES, SYSTEM, TOOLS, engine_of

PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}


@asynccontextmanager
async def sdk(*replies: Any, **options: Any) -> AsyncIterator[tuple[Agent, openai.AsyncOpenAI]]:
    """A gateway and the SDK, which knows only a base URL and a key."""
    options = {"codec": ToyCodec.chatml(), **options}
    async with (
        agent(*replies, **options) as a,
        openai.AsyncOpenAI(base_url=a.session.base_url, api_key=a.session.api_key, max_retries=0) as client,
    ):
        yield a, client


async def ask(client: openai.AsyncOpenAI, way: str, **options: Any) -> Response:
    """One response, by each of the SDK's ways to get it."""
    if way == "create":
        return await client.responses.create(model="toy", **options)
    if way == "stream":
        async with client.responses.stream(model="toy", **options) as stream:
            async for event in stream:
                assert event.type
            return await stream.get_final_response()
    last: Any = None
    async for event in await client.responses.create(model="toy", stream=True, **options):
        last = event
    return last.response  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["create", "create, streamed", "stream"])
@pytest.mark.parametrize("keeps", ["items", "ids"])
def test_multi_turn_agent_is_one_timeline(way: str, keeps: str) -> None:
    async def test() -> None:
        engine, codec = engine_of("toy")
        async with sdk(engine=engine, codec=codec) as (a, client):
            items: list[Any] = []
            options: dict[str, Any] = {"instructions": SYSTEM, "tools": TOOLS}
            answers = []
            for question in QUESTIONS:
                items.append({"role": "user", "content": question})
                while True:
                    response = await ask(client, way, input=items, **options)
                    answers.append(response)
                    if keeps == "ids":
                        items, options["previous_response_id"] = [], response.id
                    else:
                        items += response.output
                    calls = [item for item in response.output if item.type == "function_call"]
                    items += [
                        {
                            "type": "function_call_output",
                            "call_id": call.call_id,
                            "output": f"saw {json.loads(call.arguments)['at']}",
                        }
                        for call in calls
                    ]
                    if not calls:
                        break
            assert [response.output_text for response in answers] == [reply.content for reply in REPLIES]
            (line,) = await a.timelines()
            assert line["calls"] == [response.id for response in answers]
            tree = a.session.managed.session.tree
            assert not [call.applied_equivalences for call in tree.calls if call.applied_equivalences]
            for call, prompt_ids in zip(tree.calls, engine.received_prompts, strict=True):
                node = tree.nodes[call.outputs[0]]
                assert node.sampled_ids is not None
                assert tree.path_ids(node)[: len(prompt_ids)].tolist() == prompt_ids.tolist()
                assert tree.path_ids(node)[len(prompt_ids) :].tolist() == node.sampled_ids.tolist()

    run(test)


@pytest.mark.parametrize("way", ["create", "create, streamed", "stream"])
def test_responses_match_the_sdk_types(way: str) -> None:
    async def test() -> None:
        reply = Message(
            "assistant", "so", reasoning_content="hm", tool_calls=(ToolCall("apply_patch", '{"input": "x"}'),)
        )
        async with sdk(reply) as (_, client):
            options: dict[str, Any] = {
                "input": "p",
                "tools": [*TOOLS, PATCH],
                "include": ["reasoning.encrypted_content"],
                "store": False,
            }
            response = await ask(client, way, **options)
            # Reading is lenient; validating is not.
            Response.model_validate(response.model_dump())
            reasoning, message, call = response.output
            assert isinstance(reasoning, ResponseReasoningItem)
            assert isinstance(call, ResponseCustomToolCall)
            assert reasoning.content is not None
            assert (reasoning.content[0].text, call.input) == ("hm", "x")
            assert message.type == "message"
            assert response.output_text == "so"
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens == 2

    run(test)


def test_stream_events_match_the_sdk_types() -> None:
    async def test() -> None:
        both = (ToolCall("apply_patch", '{"input": "x"}'), ToolCall("look", '{"at": 1}'))
        reply = Message("assistant", "so", reasoning_content="hm", tool_calls=both)
        async with sdk(reply) as (_, client):
            for summary in (None, "auto"):
                kinds = set()
                stream: Any = await client.responses.create(  # type: ignore[call-overload]
                    model="toy",
                    input="p",
                    tools=[*TOOLS, PATCH],
                    reasoning={"summary": summary},
                    stream=True,
                )
                async for event in stream:
                    type(event).model_validate(event.model_dump())
                    assert not event.model_extra
                    kinds.add(event.type)
                assert {"response.completed", "response.custom_tool_call_input.done"} < kinds

    run(test)


def test_stream_helper_reports_a_cut_answer_as_incomplete() -> None:
    async def test() -> None:
        async with sdk("a long answer") as (_, client):
            kinds = []
            async with client.responses.stream(model="toy", input="p", max_output_tokens=4) as stream:
                async for event in stream:
                    kinds.append(event.type)
                    last: Any = event
            assert kinds[-1] == "response.incomplete"
            assert last.response.incomplete_details.reason == "max_output_tokens"

    run(test)


def test_errors_are_sdk_errors() -> None:
    async def test() -> None:
        async with sdk("ok") as (_, client):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="toy", input="p", previous_response_id="resp_none")
            assert refused.value.param == "previous_response_id"
            with pytest.raises(openai.BadRequestError, match="background"):
                await client.responses.create(model="toy", input="p", background=True)
            with pytest.raises(openai.PermissionDeniedError):
                await client.with_options(api_key="wrong").responses.create(model="toy", input="p")

    run(test)


def test_input_tokens_are_counted_without_sampling() -> None:
    async def test() -> None:
        async with sdk("ok") as (a, client):
            counted = await client.responses.input_tokens.count(model="toy", input="p", instructions=SYSTEM)
            assert not a.engine.received_prompts
            response = await client.responses.create(model="toy", input="p", instructions=SYSTEM)
            assert response.usage is not None
            assert counted.input_tokens == response.usage.input_tokens

    run(test)
