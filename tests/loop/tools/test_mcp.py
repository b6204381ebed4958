"""The SDK's own MCP server over stdio and HTTP, and the connection without a server."""

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
from mcp import MCPError, types
from mcp.client import stdio as stdio_client_module

from branchline.core.errors import ToolError, ToolUnavailableError
from branchline.core.message import Message
from branchline.loop.registry import ToolRegistry
from branchline.loop.tools import mcp_connection
from branchline.loop.tools.mcp import McpTool, McpTools, connect_tools
from tests.hang import HANG_S
from tests.loop.fake_tools import call, run_calls, tool_session
from tests.loop.harness import move_clock, pass_control, run
from tests.loop.tools import mcp_server

SERVER = str(Path(mcp_server.__file__))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a process the time to start and to end that it needs on a busy machine."""
    monkeypatch.setattr(mcp_connection, "_RECONNECT_TIMEOUT_S", HANG_S)
    monkeypatch.setattr(mcp_connection, "_CLOSE_TIMEOUT_S", HANG_S)
    for name in (
        "PROCESS_TERMINATION_TIMEOUT",
        "FORCE_KILL_TIMEOUT",
        "_KILL_REAP_TIMEOUT",
        "_WRITER_FLUSH_TIMEOUT",
    ):
        monkeypatch.setattr(stdio_client_module, name, HANG_S)


class ServerEvents:
    """Receives the events that the server sends."""

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
    events: ServerEvents | None = None, **options: Any
) -> AbstractAsyncContextManager[tuple[McpTool, ...]]:
    env = {} if events is None else {"EVENT_PORT": str(events.port)}
    return McpTools.stdio(sys.executable, SERVER, env=env, start_timeout_s=HANG_S, **options)


@pytest.mark.usefixtures("patient")
def test_tools_of_a_server_over_stdio() -> None:
    async def test() -> None:
        async with stdio() as tools:
            registry = ToolRegistry(tools)
            assert registry.names == ("add", "picture", "point", "refuse", "page", "crash", "wait", "exit")
            function = registry.get("add").schema["function"]
            assert function["description"] == "Adds two numbers."
            assert function["parameters"]["required"] == ["a", "b"]
            selection = registry.select(["add", "picture", "point", "refuse", "page", "crash"])
            async with tool_session(*selection.tools) as session:
                results = await run_calls(
                    session,
                    call("add", '{"a": 2, "b": 3}', "c1"),
                    call("picture"),
                    call("point", '{"x": 4}'),
                    call("refuse"),
                    call("page"),
                    call("crash"),
                )
                wrong = await session.run_one(call("add", '{"a": 2, "b": "three"}'))
        by_name = {result.tool: result for result in results}
        assert by_name["add"].message == Message("tool", "2 + 3 = 5", tool_call_id="c1", name="add")
        assert by_name["picture"].content == "one pixel"
        (pixel,) = by_name["picture"].media
        assert (pixel.kind, pixel.mime, pixel.payload) == ("image", "image/png", mcp_server.PIXEL)
        assert by_name["point"].extras == {"structured": {"x": 4}}
        assert (by_name["refuse"].content, by_name["refuse"].error) == ("not today", "not today")
        assert by_name["page"].content == "a page"
        assert by_name["crash"].error is not None
        assert "crash" in by_name["crash"].content
        assert wrong.error == "Error executing tool 'add': arguments.b: 'three' is not of type 'integer'"

    run(test)


@pytest.mark.usefixtures("patient")
def test_a_cancelled_call_is_cancelled_on_the_server_and_the_connection_stays_open() -> None:
    async def test() -> None:
        async with (
            ServerEvents() as events,
            stdio(events, prefix="my_") as tools,
            tool_session(*tools) as session,
        ):
            waiting = asyncio.create_task(session.run_one(call("my_wait")))
            assert (await events.lines.get()).startswith("started")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await events.lines.get() == "cancelled"
            result = await session.run_one(call("my_add", '{"a": 1, "b": 1}'))
            assert result.content == "1 + 1 = 2"

    run(test)


@pytest.mark.usefixtures("patient")
def test_a_server_that_exits_is_connected_again() -> None:
    async def test() -> None:
        async with stdio() as tools:
            async with tool_session(*tools, tool_timeout_s=HANG_S) as session:
                with pytest.raises(ToolUnavailableError, match="tool 'exit': execute: Connection closed"):
                    await session.run_one(call("exit"))
                results = await run_calls(session, *[call("add", '{"a": 1, "b": 1}') for _ in range(3)])
                assert [result.content for result in results] == ["1 + 1 = 2"] * 3
            with pytest.raises(ToolError, match=r"tool 'add': create: .*got \['x'\], expected none"):
                await tool_session(*tools, arguments={"add": {"x": 1}}).__aenter__()

    run(test)


@pytest.mark.usefixtures("patient")
def test_no_trajectory_starts_with_a_server_that_is_not_connected() -> None:
    async def test() -> None:
        async with stdio() as tools:
            pass
        with pytest.raises(ToolUnavailableError, match=r"tool '\w+': create: is not connected"):
            await tool_session(*tools).__aenter__()

    run(test)


@pytest.mark.usefixtures("patient")
def test_a_cancelled_block_ends_the_server() -> None:
    async def trajectory(events: ServerEvents) -> None:
        async with stdio(events) as tools, tool_session(*tools) as session:
            await session.run_one(call("wait"))

    async def test() -> None:
        async with ServerEvents() as events:
            task = asyncio.create_task(trajectory(events))
            _, pid = (await events.lines.get()).split()
            os.kill(int(pid), 0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await events.lines.get() == "cancelled"
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)

    run(test)


UNRESPONSIVE_SERVER = """
import socket, sys
socket.create_connection(("127.0.0.1", PORT)).sendall(b"started\\n")
sys.stderr.close()
sys.stdin.read()
"""


@pytest.mark.usefixtures("patient")
def test_a_failed_connection_is_an_error_with_the_servers_name() -> None:
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
        async with ServerEvents() as events:
            code = UNRESPONSIVE_SERVER.replace("PORT", str(events.port))
            silent = asyncio.create_task(refused(sys.executable, "-c", code, start_timeout_s=HANG_S))
            assert await events.lines.get() == "started"
            move_clock(HANG_S / 2)
            await pass_control()
            assert not silent.done()
            move_clock(HANG_S / 2)
            assert (await silent).endswith(f"connect: timed out after {HANG_S:g} s")
        with socket.socket() as unanswered:
            unanswered.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unanswered.getsockname()[1]}/mcp"
            with pytest.raises(ToolError, match="connect: All connection attempts failed"):
                async with McpTools.http(url):
                    raise AssertionError("nothing may run")

    run(test)


@pytest.mark.usefixtures("patient")
def test_a_cancellation_while_connecting_leaves_nothing_running() -> None:
    async def test() -> None:
        async def trajectory(code: str) -> None:
            async with McpTools.stdio(sys.executable, "-c", code):
                raise AssertionError("nothing may run")

        async with ServerEvents() as events:
            task = asyncio.create_task(trajectory(UNRESPONSIVE_SERVER.replace("PORT", str(events.port))))
            assert await events.lines.get() == "started"
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(test)


# -- the connection, without a server ----------------------------------------------------------------


class FakeClient:
    """Replaces the SDK's client: enters and exits when its events are set, and lists one tool per page."""

    def __init__(self) -> None:
        self.enter, self.exit = asyncio.Event(), asyncio.Event()
        self.events: list[str] = []
        self.exiting = asyncio.Event()
        self.lists = 0
        self.silent = asyncio.Event()
        """Set when a request for its tools will not be answered."""
        self.is_silent = False
        self.missing = self.failure = ""

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Any, None]:
        self.events.append("entering")
        await self.enter.wait()
        try:
            yield self
        finally:
            self.exiting.set()
            await self.exit.wait()
            self.events.append("exited")

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
        client = FakeClient()
        client.enter.set()
        client.exit.set()
        async with connect_tools(client.connect, "server", "", 5) as tools, tool_session(*tools) as session:
            assert [tool.name for tool in tools] == ["first", "second"]
            move_clock(6)
            await pass_control()
            result = await session.run_one(call("second"))
            assert result.content == '{"called":"second"}'
        assert client.events == ["entering", "exited"]

    run(test)


def test_a_trajectory_lists_the_tools_once() -> None:
    async def test() -> None:
        client = FakeClient()
        client.enter.set()
        client.exit.set()
        async with connect_tools(client.connect, "server", "", 5) as tools:
            assert client.lists == 1
            for trajectory in range(3):
                async with tool_session(*tools):
                    assert client.lists == 2 + trajectory, "one request for both tools"
            client.missing = "second"
            with pytest.raises(ToolError, match=r"'second': create: .*'second' does not exist any more"):
                await tool_session(*tools).__aenter__()
            async with tool_session(tools[0]):
                pass

    run(test)


def test_listing_tools_has_a_timeout() -> None:
    async def test() -> None:
        client = FakeClient()
        client.enter.set()
        client.exit.set()
        async with connect_tools(client.connect, "server", "", 5) as tools:
            client.is_silent = True
            creating = asyncio.create_task(tool_session(*tools).__aenter__())
            await client.silent.wait()
            move_clock(6)
            with pytest.raises(ToolError, match="create: tool 'server': list: no answer within 5 s"):
                await creating
            client.silent.clear()
            creating = asyncio.create_task(tool_session(*tools).__aenter__())
            await client.silent.wait()
            creating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creating
        assert client.events == ["entering", "exited"]

    run(test)


def test_the_servers_address_is_not_shown_to_the_model() -> None:
    async def test() -> None:
        address = "http://user:hidden@127.0.0.1:9/mcp"
        client = FakeClient()
        client.enter.set()
        client.exit.set()
        async with (
            connect_tools(client.connect, address, "my_", 5) as tools,
            tool_session(*tools) as session,
        ):
            client.failure = f"404 for url '{address}'"
            failed = await session.run_one(call("my_first"))
            assert failed.error == "Error executing tool 'my_first': 404 for url 'its server'"
            client.failure = "broken"
            failed = await session.run_one(call("my_first"))
            assert failed.error == "Error executing tool 'my_first': broken"
        with pytest.raises(ToolUnavailableError, match="'my_first': execute: is not connected"):
            await tools[0].execute(None, {})

    run(test)


def test_a_connection_is_closed_cleanly_however_often_its_user_is_cancelled() -> None:
    async def test() -> None:
        client = FakeClient()
        client.enter.set()
        inside = asyncio.Event()

        async def user() -> None:
            async with connect_tools(client.connect, "server", "", 5):
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(user())
        await inside.wait()
        task.cancel()
        await client.exiting.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        client.exit.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.events == ["entering", "exited"]

    run(test)


def test_a_connection_that_does_not_close_is_cancelled() -> None:
    async def test() -> None:
        client = FakeClient()
        client.enter.set()

        async def user() -> None:
            async with connect_tools(client.connect, "server", "", 5):
                pass

        task = asyncio.create_task(user())
        await client.exiting.wait()
        await asyncio.sleep(0)
        move_clock(60)
        await task
        assert client.events == ["entering"]

    run(test)


def test_a_connection_attempt_is_cancelled_at_once() -> None:
    async def test() -> None:
        client = FakeClient()
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(connect_tools(client.connect, "server", "", 500).__aenter__())
        while not client.events:
            await asyncio.sleep(0)
        started = loop.time()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert loop.time() - started < HANG_S

    run(test)


# -- reconnecting ------------------------------------------------------------------------------------


class DyingServer:
    """Connections that are lost after some calls; only so many can be opened."""

    def __init__(self, calls: int, connections: int) -> None:
        self.calls, self.connections, self.opened, self.closed = calls, connections, 0, 0

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Any, None]:
        if self.opened == self.connections:
            raise ConnectionRefusedError("no server at http://key@server")
        self.opened += 1
        client = DyingClient(self.calls)
        try:
            yield client
        finally:
            self.closed += 1


class DyingClient:
    """Answers some calls."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    async def list_tools(self, cursor: str | None, cache_mode: str) -> types.ListToolsResult:
        hints = types.ToolAnnotations(read_only_hint=True)
        tools = [
            types.Tool(name="look", input_schema={"type": "object"}, annotations=hints),
            types.Tool(name="act", input_schema={"type": "object"}),
        ]
        return types.ListToolsResult(tools=tools)

    async def call_tool(self, name: str, arguments: Any) -> types.CallToolResult:
        await asyncio.sleep(0)
        if not self._left:
            raise MCPError(types.CONNECTION_CLOSED, "Connection closed")
        self._left -= 1
        return types.CallToolResult(content=[types.TextContent(text="seen")])


def test_a_lost_connection_is_opened_again_for_all_trajectories_at_once() -> None:
    async def test() -> None:
        server = DyingServer(calls=2, connections=9)
        async with connect_tools(server.connect, "server", "", 5) as tools, tool_session(*tools) as session:
            assert [tool.is_repeatable for tool in tools] == [True, False]
            assert [(await session.run_one(call("look"))).extras for _ in range(2)] == [{}, {}]
            results = await run_calls(session, call("look"), call("act"))
            assert [result.content for result in results] == ["seen", "seen"]
            assert [result.extras for result in results] == [{"reconnects": 1}] * 2
            assert server.opened == 2
        assert server.closed == 2

    run(test)


def test_a_server_that_stays_gone_makes_its_tools_unavailable() -> None:
    async def test() -> None:
        server = DyingServer(calls=0, connections=1)
        async with connect_tools(server.connect, "http://key@server", "", 5) as tools:
            session = tool_session(*tools)
            await session.__aenter__()
            with pytest.raises(ToolUnavailableError) as gone:
                await session.run_one(call("look"))
            assert str(gone.value) == "tool 'look': execute: no server at its server"
            with pytest.raises(ToolUnavailableError, match="'look': create: no server at its server"):
                await tool_session(tools[0]).__aenter__()
            await session.__aexit__()

    run(test)


def test_reconnecting_is_bounded_for_a_server_that_dies_with_each_call() -> None:
    async def test() -> None:
        server = DyingServer(calls=0, connections=99)
        async with connect_tools(server.connect, "server", "", 5) as tools, tool_session(*tools) as session:
            with pytest.raises(ToolUnavailableError, match="'act': execute: Connection closed"):
                await session.run_one(call("act"))
            assert server.opened == 4

    run(test)


# -- over HTTP ---------------------------------------------------------------------------------------


class Headers:
    """Records a header of the requests."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.tokens: set[str] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.tokens.add(dict(scope["headers"]).get(b"x-token", b"").decode())
        await self._app(scope, receive, send)


@asynccontextmanager
async def serve_http() -> AsyncGenerator[tuple[str, Headers], None]:
    app = Headers(mcp_server.server.streamable_http_app())
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="on", ws="none")
    http_server = uvicorn.Server(config)
    http_server.config.load()
    sockets = [config.bind_socket()]
    task = asyncio.create_task(http_server.serve(sockets))
    try:
        yield f"http://127.0.0.1:{sockets[0].getsockname()[1]}/mcp", app
    finally:
        http_server.should_exit = True
        await task
        sockets[0].close()


@pytest.mark.usefixtures("patient")
def test_tools_of_a_server_over_http() -> None:
    async def test() -> None:
        async with serve_http() as (url, app):
            async with (
                McpTools.http(url, headers={"x-token": "abc"}) as tools,
                tool_session(*tools) as session,
            ):
                total, picture = await run_calls(session, call("add", '{"a": 2, "b": 3}'), call("picture"))
            assert total.content == "2 + 3 = 5"
            assert picture.media[0].payload == mcp_server.PIXEL
            assert app.tokens == {"abc"}

    run(test)
