"""Clients resume a call by its id or by a name of their own; a disconnect keeps what was sampled."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from branchline.core.call import Delivery
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_servers import FakeVllm
from tests.gateway.harness import Agent, agent, run


async def _disconnect(a: Agent, server: FakeVllm, **headers: str) -> str:
    """Streams a call until the server holds, and disconnects; returns its id."""
    headers["authorization"] = f"Bearer {a.session.api_key}"
    body = {"messages": [{"role": "user", "content": "p"}], "stream": True}
    url = f"{a.session.base_url}/chat/completions"
    async with httpx.AsyncClient() as http, http.stream("POST", url, json=body, headers=headers) as response:
        line = await anext(response.aiter_lines())
        await server.is_held.wait()
        return str(json.loads(line[6:])["id"])


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_resumes_its_call(named: bool, stream: bool) -> None:
    async def test() -> None:
        async with FakeVllm() as server:
            server.hold_after = 5
            async with agent(gateway_engine=VllmEngine(server.url), sampling={"max_tokens": 9}) as a:
                name = {"x-branchline-call": "mine"}
                call_id = await _disconnect(a, server, **(name if named else {}))
                server.hold_after = None
                headers = name if named else {"x-branchline-resume": call_id}
                response = await a.ask("p", headers=headers, stream=stream)
                assert response.status_code == 200, response.text
                if named:
                    assert response.headers["x-request-id"] == "mine~2"
                report = (await a.get("/samples"))["report"]
                assert report["sampled_tokens"] == report["trained_tokens"] == 9
                assert not report["dropped"]
                # The second request continued the ids of the first.
                first, second = (body["prompt"] for body in server.bodies)
                assert second[: len(first)] == first
                assert 0 < len(second) - len(first) <= 5

    run(test)


def test_a_call_that_cannot_be_resumed_is_409_and_a_bad_name_400() -> None:
    async def test() -> None:
        async with agent("one", "two") as a:
            done = await a.ask("p", headers={"x-branchline-call": "mine"})
            resumed = await a.ask("p", headers={"x-branchline-resume": done.json()["id"]})
            assert (resumed.status_code, resumed.json()["error"]["code"]) == (409, "conflict")
            refused = await a.ask("p", headers={"x-branchline-call": "a b"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-branchline-call")

    run(test)


def test_a_disconnect_before_a_buffered_answer_keeps_what_was_sampled() -> None:
    async def test() -> None:
        async with FakeVllm() as server:
            server.hold_after = 5
            async with agent(gateway_engine=VllmEngine(server.url), sampling={"max_tokens": 9}) as a:
                call = asyncio.create_task(a.ask("p"))
                await server.is_held.wait()
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                tree = a.session.managed.session.tree
                while not tree.calls or tree.delivery(tree.calls[0]) != Delivery.CANCELLED:
                    await asyncio.sleep(0)
                ids = tree.nodes[-1].sampled_ids
                assert ids is not None
                assert 0 < len(ids) <= 5

    run(test)
