"""The application gives the same results under every ASGI server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import hypercorn.asyncio
import hypercorn.config
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.core.call import Delivery
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.app import GatewayApp
from branchline.gateway.config import GatewayConfig
from branchline.gateway.uvicorn_server import UvicornServer, bind_socket
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore
from tests.gateway.harness import run

REPLY = Message("assistant", "I look.", tool_calls=(ToolCall("look", '{"at": 1}'),))
BODY = {"model": "toy", "messages": [{"role": "user", "content": "p"}]}


@asynccontextmanager
async def uvicorn_server(app: Any) -> AsyncIterator[str]:
    listener = bind_socket("127.0.0.1", 0)
    server = UvicornServer(app)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.stop()
    await task


@asynccontextmanager
async def hypercorn_server(app: Any) -> AsyncIterator[str]:
    listener = bind_socket("127.0.0.1", 0)
    config = hypercorn.config.Config()
    config.bind = [f"fd://{listener.fileno()}"]
    config.graceful_timeout = 0.1
    stop = asyncio.Event()
    task = asyncio.create_task(hypercorn.asyncio.serve(app, config, shutdown_trigger=stop.wait))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop.set()
    await task
    listener.detach()  # hypercorn has closed it


servers = pytest.mark.parametrize("server", [uvicorn_server, hypercorn_server])
Server = Callable[[Any], Any]


class RunningApp:
    """An application under a server, with one session and a client for it."""

    def __init__(self, reply: Message | str = REPLY) -> None:
        codec = ToyCodec.chatml()
        self.gate = asyncio.Event()
        self.gate.set()
        self.engine = ScriptedEngine(codec, replies(reply), gate=self.gate)
        sessions = SessionStore(codec)
        self.app = GatewayApp(self.engine, sessions, GatewayConfig(admin_key="ak"))
        self.managed, api_key, self.control_key = sessions.open(SessionOptions(id="s1"))
        self.headers = {"authorization": f"Bearer {api_key}"}


@servers
def test_whole_and_streamed_answers(server: Server) -> None:
    async def test() -> None:
        running = RunningApp()
        async with server(running.app) as url, httpx.AsyncClient(headers=running.headers) as http:
            response = await http.post(f"{url}/v1/chat/completions", json=BODY)
            assert response.status_code == 200
            (choice,) = response.json()["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] == "I look."
            streamed = await http.post(f"{url}/v1/chat/completions", json={**BODY, "stream": True})
            assert streamed.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in streamed.text.split("\n") if line]
            assert lines[-1] == "data: [DONE]"
            choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            (call,) = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
            assert (text, call["function"]) == ("I look.", {"name": "look", "arguments": '{"at": 1}'})
            assert choices[-1]["finish_reason"] == "tool_calls"
            refused = await http.post(f"{url}/v1/chat/completions", json={**BODY, "n": 0})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
            view = await http.get(
                f"{url}/sessions/s1", headers={"authorization": f"Bearer {running.control_key}"}
            )
            assert (view.json()["calls"], view.json()["in_flight"]) == (2, 0)
        tree = running.managed.session.tree
        assert [tree.delivery(call) for call in tree.calls] == [Delivery.DELIVERED, Delivery.DELIVERED]

    run(test)


@servers
def test_disconnect_cancels_the_call(server: Server) -> None:
    async def test() -> None:
        reply = "word " * 5000  # too long to be complete before the client disconnects
        running = RunningApp(reply)
        async with server(running.app) as url, httpx.AsyncClient(headers=running.headers) as http:
            body = {**BODY, "stream": True}
            async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    running.gate.clear()
                    break
            while running.app.model_api.in_flight:
                await asyncio.sleep(0.001)
        tree = running.managed.session.tree
        (call,) = tree.calls
        assert tree.delivery(call) == Delivery.CANCELLED
        text = tree.nodes[call.outputs[0]].message.content
        assert 0 < len(text) < len(reply)
        assert reply.startswith(text)

    run(test)
