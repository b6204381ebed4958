"""A real MCP server, the SDK's own, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import uvicorn
from mcp import types

from branchline.core.errors import ToolError
from branchline.core.message import Message
from branchline.loop.registry import ToolRegistry
from branchline.loop.tools.mcp import McpTool, McpTools, connect_tools
from branchline.loop.tools.tool_session import ToolOutcome
from tests.loop.fake_tools import call, tool_session
from tests.loop.harness import move_clock, run
from tests.loop.tools import mcp_server

SERVER = str(Path(mcp_server.__file__))


class ServerEvents:
    """Hears what the server tells of its insides."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._receive, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.close()
        self.lines.put_nowait(line.decode().strip())


def stdio(
    notes: ServerEvents | None = None, **options: Any
) -> AbstractAsyncContextManager[tuple[McpTool, ...]]:
    env = {} if notes is None else {"NOTES": str(notes.port)}
    return McpTools.stdio(sys.executable, SERVER, env=env, **options)


def by_tool_name(outcomes: list[ToolOutcome]) -> dict[str, ToolOutcome]:
    return {outcome.call.name: outcome for outcome in outcomes}


def test_tools_of_a_server_over_stdio() -> None:
    async def test() -> None:
        async with stdio() as tools:
            registry = ToolRegistry(tools)
            assert registry.names == ("add", "picture", "point", "refuse", "page", "crash", "wait", "leave")
            function = registry.get("add").schema["function"]
            assert function["description"] == "Adds two numbers."
            assert function["parameters"]["required"] == ["a", "b"]
            selection = registry.select(["add", "picture", "point", "refuse", "page", "crash"])
            async with tool_session(*selection.tools) as workshop:
                outcomes = await workshop.run(
                    [
                        call("add", '{"a": 2, "b": 3}', "c1"),
                        call("picture"),
                        call("point", '{"x": 4}'),
                        call("refuse"),
                        call("page"),
                        call("crash"),
                    ]
                )
                (wrong,) = await workshop.run([call("add", '{"a": 2, "b": "three"}')])
        by_name = by_tool_name(outcomes)
        assert by_name["add"].message == Message("tool", "2 + 3 = 5", tool_call_id="c1", name="add")
        assert by_name["picture"].message.content == "one pixel"
        (pixel,) = by_name["picture"].message.media
        assert (pixel.kind, pixel.mime, pixel.payload) == ("image", "image/png", mcp_server.PIXEL)
        assert by_name["point"].extras == {"structured": {"x": 4}}
        assert (by_name["refuse"].message.content, by_name["refuse"].error) == ("not today", "not today")
        assert by_name["page"].message.content == "a page"
        assert by_name["crash"].error is not None
        assert "crash" in by_name["crash"].message.content
        assert wrong.error == "Error executing tool 'add': arguments.b: 'three' is not of type 'integer'"

    run(test)


def test_a_cancelled_call_is_cancelled_on_the_server_and_the_connection_goes_on() -> None:
    async def test() -> None:
        async with (
            ServerEvents() as notes,
            stdio(notes, prefix="my_") as tools,
            tool_session(*tools) as workshop,
        ):
            waiting = asyncio.create_task(workshop.run([call("my_wait")]))
            assert (await notes.lines.get()).startswith("began")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await notes.lines.get() == "cancelled"
            (outcome,) = await workshop.run([call("my_add", '{"a": 1, "b": 1}')])
            assert outcome.message.content == "1 + 1 = 2"

    run(test)


def test_a_server_that_dies_is_told_to_the_model() -> None:
    async def test() -> None:
        async with stdio() as tools:
            async with tool_session(*tools) as workshop:
                for name in ("leave", "add"):
                    (outcome,) = await workshop.run([call(name, '{"a": 1, "b": 1}' if name == "add" else "")])
                    assert outcome.error == f"Error executing tool '{name}': Connection closed"
            with pytest.raises(ToolError, match=r"tool 'add': create: .*got \['x'\], expected none"):
                await tool_session(*tools, arguments={"add": {"x": 1}}).__aenter__()

    run(test)


def test_no_trajectory_begins_on_a_server_that_is_gone() -> None:
    async def test() -> None:
        async with stdio() as tools:
            async with tool_session(*tools) as workshop:
                await workshop.run([call("leave")])
            with pytest.raises(
                ToolError, match=r"tool '\w+': create: tool .*server\.py': list: Connection closed"
            ):
                await tool_session(*tools).__aenter__()
        with pytest.raises(ToolError, match=r"create: .*: list: is not connected"):
            await tool_session(*tools).__aenter__()

    run(test)


def test_leaving_the_block_by_a_cancellation_ends_the_server_too() -> None:
    async def trajectory(notes: ServerEvents) -> None:
        async with stdio(notes) as tools, tool_session(*tools) as workshop:
            await workshop.run([call("wait")])

    async def test() -> None:
        async with ServerEvents() as notes:
            task = asyncio.create_task(trajectory(notes))
            _, pid = (await notes.lines.get()).split()
            os.kill(int(pid), 0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await notes.lines.get() == "cancelled"
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)

    run(test)


UNRESPONSIVE_SERVER = "import sys; sys.stderr.close(); sys.stdin.read()"


def test_a_server_that_cannot_be_started_is_an_error_that_names_it() -> None:
    async def refused(*command: str, **options: Any) -> str:
        with pytest.raises(ToolError) as error:
            async with McpTools.stdio(*command, **options):
                raise AssertionError("nothing may run")
        assert error.value.action == "connect"
        return str(error.value)

    async def test() -> None:
        assert await refused("no-such-command") == (
            "tool 'no-such-command': connect: [Errno 2] No such file or directory: 'no-such-command'"
        )
        assert (await refused(sys.executable, "-c", "pass")).endswith("-c pass': connect: Connection closed")
        silent = await refused(sys.executable, "-c", UNRESPONSIVE_SERVER, start_timeout_s=0.2)
        assert silent.endswith("connect: timed out after 0.2 s")
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{deaf.getsockname()[1]}/mcp"
            with pytest.raises(ToolError, match="connect: All connection attempts failed"):
                async with McpTools.http(url):
                    raise AssertionError("nothing may run")

    run(test)


def test_cancelled_while_connecting_leaves_nothing_behind() -> None:
    async def test() -> None:
        async def trajectory() -> None:
            async with McpTools.stdio(sys.executable, "-c", UNRESPONSIVE_SERVER):
                raise AssertionError("nothing may run")

        task = asyncio.create_task(trajectory())
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test)


# -- the connection, without a server ----------------------------------------------------------------


class FakeClient:
    """A client in place of the SDK's: it enters and leaves when it may, and lists a tool a page."""

    def __init__(self) -> None:
        self.enter, self.leave = asyncio.Event(), asyncio.Event()
        self.events: list[str] = []
        self.leaving = asyncio.Event()
        self.lists = 0
        self.silent = asyncio.Event()
        """Set when it was asked for its tools and will not answer."""
        self.is_silent = False
        self.missing = self.failure = ""

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Any, None]:
        self.events.append("entering")
        await self.enter.wait()
        try:
            yield self
        finally:
            self.leaving.set()
            await self.leave.wait()
            self.events.append("left")

    async def list_tools(self, cursor: str | None, cache_mode: str) -> types.ListToolsResult:
        assert cache_mode == "bypass"
        self.lists += not cursor
        if self.is_silent:
            self.silent.set()
            await asyncio.Event().wait()
        name = cursor or "first"
        tools = [types.Tool(name=name, input_schema={"type": "object"})] if name != self.missing else []
        return types.ListToolsResult(tools=tools, next_cursor=None if cursor else "second")

    async def call_tool(self, name: str, arguments: Any) -> types.CallToolResult:
        if self.failure:
            raise RuntimeError(self.failure)
        return types.CallToolResult(content=[], structured_content={"called": name})


def test_all_pages_of_tools_are_read_and_an_open_connection_has_no_deadline() -> None:
    async def test() -> None:
        gates = FakeClient()
        gates.enter.set()
        gates.leave.set()
        async with connect_tools(gates.connect(), "server", "", 5) as tools, tool_session(*tools) as workshop:
            assert [tool.name for tool in tools] == ["first", "second"]
            move_clock(6)
            for _ in range(5):
                await asyncio.sleep(0)
            (outcome,) = await workshop.run([call("second")])
            assert outcome.message.content == '{"called":"second"}'
        assert gates.events == ["entering", "left"]

    run(test)


def test_a_trajectory_asks_the_server_once_what_it_has() -> None:
    async def test() -> None:
        gates = FakeClient()
        gates.enter.set()
        gates.leave.set()
        async with connect_tools(gates.connect(), "server", "", 5) as tools:
            assert gates.lists == 1
            for trajectory in range(3):
                async with tool_session(*tools):
                    assert gates.lists == 2 + trajectory, "one answer for both tools"
            gates.missing = "second"
            with pytest.raises(ToolError, match=r"'second': create: .*'second' is not there any more"):
                await tool_session(*tools).__aenter__()
            async with tool_session(tools[0]):
                pass

    run(test)


def test_a_server_that_does_not_answer_is_given_up_after_a_while() -> None:
    async def test() -> None:
        gates = FakeClient()
        gates.enter.set()
        gates.leave.set()
        async with connect_tools(gates.connect(), "server", "", 5) as tools:
            gates.is_silent = True
            creating = asyncio.create_task(tool_session(*tools).__aenter__())
            await gates.silent.wait()
            move_clock(6)
            with pytest.raises(ToolError, match="create: tool 'server': list: no answer within 5 s"):
                await creating
            gates.silent.clear()
            creating = asyncio.create_task(tool_session(*tools).__aenter__())
            await gates.silent.wait()
            creating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creating
        assert gates.events == ["entering", "left"], "and nobody is left who waits for it"

    run(test)


def test_the_model_is_not_told_where_a_server_lives() -> None:
    async def test() -> None:
        address = "http://user:hidden@127.0.0.1:9/mcp"
        gates = FakeClient()
        gates.enter.set()
        gates.leave.set()
        async with (
            connect_tools(gates.connect(), address, "my_", 5) as tools,
            tool_session(*tools) as workshop,
        ):
            gates.failure = f"404 for url '{address}'"
            (failed,) = await workshop.run([call("my_first")])
            assert failed.error == "Error executing tool 'my_first': 404 for url 'its server'"
            gates.failure = "no luck"
            (failed,) = await workshop.run([call("my_first")])
            assert failed.error == "Error executing tool 'my_first': no luck"
        with pytest.raises(ConnectionError, match="its server is not connected"):
            await tools[0].execute(None, {})

    run(test)


def test_a_connection_is_ended_in_order_however_often_its_user_is_cancelled() -> None:
    async def test() -> None:
        gates = FakeClient()
        gates.enter.set()
        inside = asyncio.Event()

        async def user() -> None:
            async with connect_tools(gates.connect(), "server", "", 5):
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(user())
        await inside.wait()
        task.cancel()
        await gates.leaving.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        gates.leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gates.events == ["entering", "left"]

    run(test)


def test_a_connection_that_does_not_end_is_cut_short() -> None:
    async def test() -> None:
        gates = FakeClient()
        gates.enter.set()

        async def user() -> None:
            async with connect_tools(gates.connect(), "server", "", 5):
                pass

        task = asyncio.create_task(user())
        await gates.leaving.wait()
        await asyncio.sleep(0)
        move_clock(60)
        await task
        assert gates.events == ["entering"]

    run(test)


def test_a_connection_that_is_not_there_yet_is_given_up_at_once() -> None:
    async def test() -> None:
        gates = FakeClient()
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(connect_tools(gates.connect(), "server", "", 500).__aenter__())
        while not gates.events:
            await asyncio.sleep(0)
        began = loop.time()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert loop.time() - began < 10

    run(test)


# -- over HTTP ---------------------------------------------------------------------------------------


class Headers:
    """Notes what requests carry."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.tokens: set[str] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.tokens.add(dict(scope["headers"]).get(b"x-token", b"").decode())
        await self._app(scope, receive, send)


@asynccontextmanager
async def served() -> AsyncGenerator[tuple[str, Headers], None]:
    app = Headers(mcp_server.server.streamable_http_app())
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="on", ws="none")
    listening = uvicorn.Server(config)
    listening.config.load()
    sockets = [config.bind_socket()]
    task = asyncio.create_task(listening.serve(sockets))
    try:
        yield f"http://127.0.0.1:{sockets[0].getsockname()[1]}/mcp", app
    finally:
        listening.should_exit = True
        await task
        sockets[0].close()


def test_tools_of_a_server_over_http() -> None:
    async def test() -> None:
        async with served() as (url, app):
            async with (
                McpTools.http(url, headers={"x-token": "abc"}) as tools,
                tool_session(*tools) as workshop,
            ):
                sum_, picture = await workshop.run([call("add", '{"a": 2, "b": 3}'), call("picture")])
            assert sum_.message.content == "2 + 3 = 5"
            assert picture.message.media[0].payload == mcp_server.PIXEL
            assert app.tokens == {"abc"}

    run(test)
