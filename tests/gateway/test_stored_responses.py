"""A response is read again by its id, as it was answered or as its record has it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.server import Gateway
from branchline.gateway.stored_responses import StoredResponses
from tests.gateway.harness import Agent, agent, run

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = Message("assistant", "", reasoning_content="hm", tool_calls=(ToolCall("look", '{"at": 1}'),))
FIELDS: dict[str, Any] = {
    "model": "gpt-9",
    "input": "p",
    "instructions": "be brief",
    "metadata": {"a": "b"},
    "tools": [TOOL],
    "temperature": 0.5,
}


async def respond(a: Agent, prefix: str = "", **body: Any) -> Any:
    """The response to a request, whole or streamed."""
    url = f"{a.gateway.url}/sessions/{a.session.id}{prefix}/v1/responses"
    answer = await a.http.post(url, json={**FIELDS, **body}, headers=a.api_headers)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    return events[-1]["response"]


async def read(a: Agent, response_id: str, prefix: str = "/sessions/{id}", **options: Any) -> httpx.Response:
    url = f"{a.gateway.url}{prefix.format(id=a.session.id)}/v1/responses/{response_id}"
    return await a.http.get(url, **{"headers": a.api_headers, **options})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reply", [CALL, Message("assistant", "yes", reasoning_content="hm")])
def test_response_is_read_as_it_was_answered(stream: bool, reply: Message) -> None:
    async def test() -> None:
        async with agent(reply) as a:
            answered = await respond(a, stream=stream)
            for prefix in ("/sessions/{id}", "", "/agents/critic", "/sessions/{id}/agents/critic"):
                assert (await read(a, answered["id"], prefix)).json() == answered
            async with openai.AsyncOpenAI(base_url=a.session.base_url, api_key=a.session.api_key) as client:
                response = await client.responses.retrieve(answered["id"])
            assert response.output[0].type == "reasoning"
            assert response.model == "gpt-9"

    run(test)


def test_response_of_an_agents_path_is_read() -> None:
    async def test() -> None:
        async with agent("x") as a:
            answered = await respond(a, "/agents/critic")
            assert (await read(a, answered["id"])).json() == answered

    run(test)


def test_unknown_response_is_404_in_the_envelope() -> None:
    async def test() -> None:
        async with agent("x") as a:
            missing = await read(a, "resp_nothing")
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "not_found"
            assert "resp_nothing" in missing.json()["error"]["message"]
            streamed = await read(a, (await respond(a))["id"], params={"stream": "true"})
            assert streamed.status_code == 400
            assert streamed.json()["error"]["param"] == "stream"

    run(test)


def test_response_of_another_session_is_not_read() -> None:
    async def test() -> None:
        async with agent("x") as a:
            answered = await respond(a)
            other = await a.gateway.session()
            headers = {"authorization": f"Bearer {other.api_key}"}
            assert (await read(a, answered["id"], headers=headers)).status_code == 403
            assert (await read(a, answered["id"], "", headers=headers)).status_code == 404
            assert (await read(a, answered["id"], headers={})).status_code == 401
            assert (await read(a, answered["id"], headers=a.control_headers)).json() == answered

    run(test)


def test_response_is_read_from_the_record_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(CALL, "yes", journal=tmp_path / "j") as a:
            first = await respond(a)
            second = await respond(a, previous_response_id=first["id"], input=[], store=False)
            session = a.session
        async with (
            Gateway(engine=ScriptedEngine(ToyCodec()), codec=ToyCodec(), journal=tmp_path / "j") as again,
            httpx.AsyncClient() as http,
        ):
            for answered in (first, second):
                url = f"{again.url}/sessions/{session.id}/v1/responses/{answered['id']}"
                headers = {"authorization": f"Bearer {session.api_key}"}
                stored = (await http.get(url, headers=headers)).json()
                assert stored["from_record"]
                recorded = ("id", "object", "status", "output", "incomplete_details", "error", "temperature")
                assert {name: stored[name] for name in recorded} == {
                    name: answered[name] for name in recorded
                }
                assert stored["usage"] == answered["usage"]
                for name in (
                    "model",
                    "created_at",
                    "instructions",
                    "tools",
                    "metadata",
                    "previous_response_id",
                ):
                    assert stored[name] is None  # not a default that the request did not have

    run(test)


def test_cancelled_response_is_read_with_what_was_sampled() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec(), replies("one two three four"), gate=asyncio.Event())
        async with agent(engine=engine) as a:
            assert engine.gate is not None
            body, url = {**FIELDS, "stream": True}, f"{a.session.base_url}/responses"
            async with a.http.stream("POST", url, json=body, headers=a.api_headers) as response:
                engine.gate.set()  # for one chunk
                await asyncio.sleep(0)
                engine.gate.clear()
                async for line in response.aiter_lines():
                    if "output_text.delta" in line:
                        break
            tree = a.session.managed.session.tree
            while not tree.calls:
                await asyncio.sleep(0.001)
            stored = (await read(a, tree.calls[0].id)).json()
            assert stored["status"] == "cancelled"
            text = stored["output"][0]["content"][0]["text"]
            assert text
            assert "one two three four".startswith(text)

    run(test)


def test_latest_responses_are_kept_up_to_a_limit() -> None:
    async def test() -> None:
        async with agent(*["x"] * 5) as a:
            kept = a.gateway.app.model_api._stored_responses = StoredResponses(max_bytes=4000)
            answered = [await respond(a, input=f"p{number}") for number in range(5)]
            assert 0 < len(kept._encoded) < 5
            assert kept._bytes == sum(map(len, kept._encoded.values())) <= 4000
            from_record = [(await read(a, one["id"])).json().get("from_record", False) for one in answered]
            assert from_record == sorted(from_record, reverse=True)
            assert from_record[0]
            assert not from_record[-1]

    run(test)
