"""Tools of MCP servers, through the official SDK.

    async with McpTools.stdio("uvx", "mcp-server-time") as tools:
        registry = ToolRegistry(tools)

One connection serves all trajectories; for a server that keeps state, open one connection per trajectory. The
connection runs in a task that is never cancelled from outside, because the SDK does not shut a server process
down cleanly then; leaving the block ends it. `create` lists the server's tools, so that no trajectory starts
with a server that is gone.

A connection that is lost is opened again, and the call is sent again, a bounded number of times. If the
server stays gone, a ToolUnavailableError ends the trajectory.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from branchline.core.errors import InputError, ToolError, ToolUnavailableError
from branchline.core.extras import requires_extra
from branchline.core.message import Media
from branchline.loop.timeouts import describe_error, finish_despite_cancel
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema, media_from_bytes
from branchline.loop.tools.mcp_connection import (
    McpConnection,
    McpServer,
    ServerGoneError,
    http_connection,
    stdio_connection,
)

with requires_extra():
    from mcp import Client, StdioServerParameters, stdio_client, types

T = TypeVar("T")

_START_TIMEOUT_S = 30.0


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

        def open_client() -> AbstractAsyncContextManager[Client]:
            return stdio_connection(stdio_client(server, errlog=sys.__stderr__ or sys.stderr))

        return connect_tools(open_client, " ".join((command, *args)), prefix, start_timeout_s)

    @staticmethod
    def http(
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        prefix: str = "",
        start_timeout_s: float = _START_TIMEOUT_S,
    ) -> AbstractAsyncContextManager[tuple[McpTool, ...]]:
        """A running server, over streamable HTTP."""
        open_client = partial(http_connection, url, dict(headers or {}))
        return connect_tools(open_client, url, prefix, start_timeout_s)


class McpTool(BaseTool):
    """One tool of a server."""

    def __init__(self, server: McpServer, tool: types.Tool, prefix: str) -> None:
        self.name = prefix + tool.name
        self.schema = function_schema(self.name, tool.description or "", tool.input_schema)
        hints = tool.annotations
        self.is_repeatable = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        self._server = server
        self._remote_name = tool.name

    @property
    def is_stateful(self) -> bool:
        return False

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        if arguments:
            raise InputError(f"tool_arguments: got {sorted(arguments)}, expected none for an MCP tool")
        await self._request("list", lambda connection: connection.require_tool(self._remote_name))
        return None

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """The result of the call; `extras["reconnects"]` is how often the connection was lost meanwhile."""

        async def call(connection: McpConnection) -> types.CallToolResult:
            assert connection.client is not None, "it is open"
            return await connection.client.call_tool(self._remote_name, dict(arguments))

        answer, reconnects = await self._request("execute", call)
        result = _to_tool_result(answer)
        if not reconnects:
            return result
        return msgspec.structs.replace(result, extras={**result.extras, "reconnects": reconnects})

    async def _request(self, action: str, send: Callable[[McpConnection], Awaitable[T]]) -> tuple[T, int]:
        """The answer to a request, and how often the connection was lost. Raises ToolUnavailableError if the
        server stays gone; errors do not contain its address, which may contain keys."""
        server = self._server
        try:
            return await server.request(send)
        except ServerGoneError as error:
            problem = str(error).replace(server.name, "its server")
            raise ToolUnavailableError(self.name, action, problem) from error
        except ToolError:
            raise
        except Exception as error:
            text = describe_error(error)
            if server.name not in text:
                raise
            raise ConnectionError(text.replace(server.name, "its server")) from error


@asynccontextmanager
async def connect_tools(
    open_client: Callable[[], AbstractAsyncContextManager[Client]], server: str, prefix: str, timeout_s: float
) -> AsyncGenerator[tuple[McpTool, ...], None]:
    """The tools of a server; `open_client` returns a client of the SDK, connected to it."""
    connected = McpServer(open_client, server, timeout_s)
    try:
        await connected.open()
        yield tuple(McpTool(connected, tool, prefix) for tool in connected.tools)
    finally:
        await finish_despite_cancel(connected.close())


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
