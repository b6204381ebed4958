"""Tools of MCP servers, through the official SDK.

    async with McpTools.stdio("uvx", "mcp-server-time") as tools:
        registry = ToolRegistry(tools)

One connection serves all trajectories; for a server that keeps state, open one connection per trajectory. The
connection runs in a task that is never cancelled from outside, because the SDK does not shut a server process
down cleanly then; leaving the block ends it. `create` lists the server's tools, so that no trajectory starts
with a server that is gone.
"""

from __future__ import annotations

import asyncio
import base64
import math
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from branchline.core.errors import InputError, ToolError, requires_extra
from branchline.core.message import Media
from branchline.loop.timeouts import describe_error, finish_despite_cancel
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema, media_from_bytes

with requires_extra("mcp"):
    import anyio
    import httpx2
    from mcp import Client, StdioServerParameters, stdio_client, types
    from mcp.client.streamable_http import streamable_http_client

_START_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 15.0
"""Longer than the SDK needs to shut down; then the connection is cancelled."""
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 30.0, 300.0
_MAX_EVENT_BYTES = 64 * 1024 * 1024
"""An image arrives as one event."""
_MAX_PAGES = 100


class McpTools:
    """Ways to connect to a server; each is an async context manager that returns its tools."""

    @staticmethod
    def stdio(
        command: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        prefix: str = "",
        start_timeout_s: float = _START_TIMEOUT_S,
    ) -> AbstractAsyncContextManager[tuple[McpTool, ...]]:
        """A server started as a process; `env` extends the SDK's small environment, stderr is inherited.

        `prefix` is added to tool names, for two servers whose names collide.
        """
        server = StdioServerParameters(command=command, args=list(args), env=dict(env or {}), cwd=cwd)
        streams = stdio_client(server, errlog=sys.__stderr__ or sys.stderr)
        return connect_tools(_client(streams), " ".join((command, *args)), prefix, start_timeout_s)

    @staticmethod
    def http(
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        prefix: str = "",
        start_timeout_s: float = _START_TIMEOUT_S,
    ) -> AbstractAsyncContextManager[tuple[McpTool, ...]]:
        """A running server, over streamable HTTP."""
        return connect_tools(_http_client(url, dict(headers or {})), url, prefix, start_timeout_s)


class McpTool(BaseTool):
    """One tool of a server."""

    def __init__(self, connection: _McpConnection, tool: types.Tool, prefix: str) -> None:
        self.name = prefix + tool.name
        self.schema = function_schema(self.name, tool.description or "", tool.input_schema)
        self._connection = connection
        self._remote_name = tool.name

    @property
    def is_stateful(self) -> bool:
        return False

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        if arguments:
            raise InputError(f"tool_arguments: got {sorted(arguments)}, expected none for an MCP tool")
        await self._connection.require_tool(self._remote_name)
        return None

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        client = self._connection.client
        if client is None:
            raise ConnectionError("its server is not connected")
        try:
            return _to_tool_result(await client.call_tool(self._remote_name, dict(arguments)))
        except Exception as error:
            # The model must not see the server's address, which may contain keys.
            text, server = describe_error(error), self._connection.server
            if server not in text:
                raise
            raise ConnectionError(text.replace(server, "its server")) from error


# -- the connection ----------------------------------------------------------------------------------


class _McpConnection:
    """A client and the task it runs in."""

    def __init__(
        self, client_context: AbstractAsyncContextManager[Client], server: str, timeout_s: float
    ) -> None:
        self.server = server
        self.client: Client | None = None
        """None before the connection is open and after it has ended."""
        self._client_context = client_context
        self._timeout_s = timeout_s
        self._scope = anyio.CancelScope()
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()
        self._error = "is not connected"
        self.tools: list[types.Tool] = []
        self._task = asyncio.create_task(self._run())
        self._listing: asyncio.Task[list[types.Tool] | str] | None = None

    async def open(self) -> None:
        """Returns when the tools are known. Raises ToolError if the connection failed."""
        await self._opened.wait()
        if self.client is None:
            raise ToolError(self.server, "connect", self._error)

    async def require_tool(self, name: str) -> None:
        """Raises ToolError unless the server has this tool; concurrent callers share one request."""
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list_tools())
        found = await asyncio.shield(self._listing)
        if isinstance(found, str):
            raise ToolError(self.server, "list", found)
        if name not in [tool.name for tool in found]:
            raise ToolError(self.server, "list", f"{name!r} does not exist any more")

    async def _list_tools(self) -> list[types.Tool] | str:
        """The server's tools, or the text of an error."""
        if self.client is None:
            return self._error
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _list_all_tools(self.client)
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except Exception as error:
            return describe_error(error)

    async def close(self) -> None:
        self._closing.set()
        if self._listing is not None:
            self._listing.cancel()
            await asyncio.wait({self._listing})
        if not self._opened.is_set():
            self._scope.cancel()
        done, _ = await asyncio.wait({self._task}, timeout=_CLOSE_TIMEOUT_S)
        if not done:
            self._scope.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        scope = self._scope
        scope.deadline = anyio.current_time() + self._timeout_s
        try:
            with scope:
                async with self._client_context as client:
                    self.tools = await _list_all_tools(client)
                    scope.deadline = math.inf
                    self.client = client
                    self._opened.set()
                    await self._closing.wait()
                    self.client = None
            if not self._opened.is_set():
                self._error = f"timed out after {self._timeout_s:g} s"
        except Exception as error:
            self._error = describe_error(error)
        finally:
            self.client = None
            self._opened.set()


@asynccontextmanager
async def connect_tools(
    client_context: AbstractAsyncContextManager[Client], server: str, prefix: str, timeout_s: float
) -> AsyncGenerator[tuple[McpTool, ...], None]:
    """The tools of the server that an SDK client is connected to."""
    connection = _McpConnection(client_context, server, timeout_s)
    try:
        await connection.open()
        yield tuple(McpTool(connection, tool, prefix) for tool in connection.tools)
    finally:
        await finish_despite_cancel(connection.close())


@asynccontextmanager
async def _client(streams: Any) -> AsyncGenerator[Client, None]:
    async with Client(streams) as client:
        yield client


@asynccontextmanager
async def _http_client(url: str, headers: dict[str, str]) -> AsyncGenerator[Client, None]:
    timeout = httpx2.Timeout(_CONNECT_TIMEOUT_S, read=_READ_TIMEOUT_S)
    async with httpx2.AsyncClient(headers=headers, timeout=timeout) as http:
        streams = streamable_http_client(url, http_client=http, max_sse_event_size=_MAX_EVENT_BYTES)
        async with Client(streams) as client:
            yield client


async def _list_all_tools(client: Client) -> list[types.Tool]:
    """All tools, page by page."""
    tools: list[types.Tool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        # Without the SDK's cache: the request also checks that the server is there.
        page = await client.list_tools(cursor=cursor, cache_mode="bypass")
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


# -- results -----------------------------------------------------------------------------------------


def _to_tool_result(result: types.CallToolResult) -> ToolResult:
    texts: list[str] = []
    media: list[Media] = []
    for block in result.content:
        content = _content(block)
        if isinstance(content, str):
            texts.append(content)
        else:
            media.append(content)
    structured = result.structured_content
    if structured is not None and not (texts or media):
        texts.append(msgspec.json.encode(structured).decode())
    extras = {} if structured is None else {"structured": structured}
    return ToolResult("\n".join(texts), tuple(media), extras=extras, is_error=result.is_error)


def _content(block: types.ContentBlock) -> str | Media:
    if isinstance(block, types.TextContent):
        return block.text
    if isinstance(block, types.ImageContent | types.AudioContent):
        return media_from_bytes(base64.b64decode(block.data), block.mime_type)
    if isinstance(block, types.ResourceLink):
        return f"{block.name}: {block.uri}"
    resource = block.resource
    if isinstance(resource, types.TextResourceContents):
        return resource.text
    return media_from_bytes(base64.b64decode(resource.blob), resource.mime_type or "application/octet-stream")
