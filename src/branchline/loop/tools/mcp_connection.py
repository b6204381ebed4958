"""The connection to an MCP server: opened in a task of its own, and replaced when it is lost.

The task is never cancelled from outside, because the SDK does not shut a server process down cleanly then.
All callers share one attempt to reconnect, and a cancelled caller does not end it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from branchline.core.errors import ToolError
from branchline.core.extras import requires_extra
from branchline.loop.timeouts import describe_error

with requires_extra():
    import anyio
    import httpx2
    from mcp import Client, MCPError, types
    from mcp.client.streamable_http import streamable_http_client

log = logging.getLogger("branchline.tools")
T = TypeVar("T")

_RECONNECT_TIMEOUT_S = 30.0
"""All attempts to open a lost connection again; shorter than a tool call's default timeout."""
_RECONNECT_DELAYS_S = (0.0, 0.2, 1.0)
"""The wait before each attempt."""
_CLOSE_TIMEOUT_S = 15.0
"""Longer than the SDK needs to shut down; then the connection is cancelled."""
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 30.0, 300.0
_MAX_EVENT_BYTES = 64 * 1024 * 1024
"""An image arrives as one event."""
_MAX_PAGES = 100


class ServerGoneError(Exception):
    """A connection is lost and could not be opened again."""


class McpServer:
    """A server and the current connection to it; a lost connection is replaced, once for all callers."""

    def __init__(
        self, open_client: Callable[[], AbstractAsyncContextManager[Client]], name: str, timeout_s: float
    ) -> None:
        self.name = name
        self._open_client = open_client
        self._timeout_s = timeout_s
        self._connection = McpConnection(open_client(), name, timeout_s)
        self._reconnecting: asyncio.Task[str] | None = None
        self._is_closed = False

    @property
    def tools(self) -> list[types.Tool]:
        return self._connection.tools

    async def open(self) -> None:
        await self._connection.open()

    async def request(self, send: Callable[[McpConnection], Awaitable[T]]) -> tuple[T, int]:
        """The answer to a request, sent again after each reconnect, and the number of reconnects."""
        problem = "is not connected"
        for reconnects in range(len(_RECONNECT_DELAYS_S) + 1):
            connection = self._connection
            if connection.client is not None:
                try:
                    return await send(connection), reconnects
                except Exception as error:
                    if not _is_lost(error):
                        raise
                    problem = describe_error(error)
            if self._is_closed or reconnects == len(_RECONNECT_DELAYS_S):
                break
            if connection is self._connection and (failed := await self._reconnect(connection)):
                problem = failed
                break
        raise ServerGoneError(problem)

    async def _reconnect(self, lost: McpConnection) -> str:
        """Replaces a lost connection; returns why that failed, or an empty text. Callers share one attempt,
        which a cancelled caller does not end."""
        if self._reconnecting is None or self._reconnecting.done():
            self._reconnecting = asyncio.create_task(self._replace(lost))
        return await asyncio.shield(self._reconnecting)

    async def _replace(self, lost: McpConnection) -> str:
        problem, clock = "", asyncio.get_running_loop()
        deadline = clock.time() + _RECONNECT_TIMEOUT_S
        await lost.close()
        for delay_s in _RECONNECT_DELAYS_S:
            await asyncio.sleep(delay_s)
            timeout_s = min(self._timeout_s, deadline - clock.time())
            if timeout_s <= 0 or self._is_closed:
                break
            log.warning("MCP server: the connection was lost and is opened again")
            connection = McpConnection(self._open_client(), self.name, timeout_s)
            try:
                await connection.open()
            except ToolError as error:
                problem = error.problem
                await connection.close()
            else:
                self._connection = connection
                return ""
        return problem or f"no connection within {_RECONNECT_TIMEOUT_S:g} s"

    async def close(self) -> None:
        self._is_closed = True
        if self._reconnecting is not None:
            # Bounded by the reconnect timeout; a connection that it opens has to be closed.
            await asyncio.wait({self._reconnecting})
        await self._connection.close()


def _is_lost(error: Exception) -> bool:
    """Whether a request failed because there is no connection, or the server has forgotten it."""
    if isinstance(error, MCPError):
        return error.code == types.CONNECTION_CLOSED or error.message == "Session terminated"
    lost = (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError, httpx2.TransportError)
    return isinstance(error, lost)


class McpConnection:
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
        self._listing: asyncio.Task[list[types.Tool] | Exception] | None = None

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
        if isinstance(found, Exception):
            if _is_lost(found):
                raise found
            raise ToolError(self.server, "list", describe_error(found))
        if name not in [tool.name for tool in found]:
            raise ToolError(self.server, "list", f"{name!r} does not exist any more")

    async def _list_tools(self) -> list[types.Tool] | Exception:
        """The server's tools, or the error."""
        if self.client is None:
            return ConnectionError(self._error)
        try:
            async with asyncio.timeout(self._timeout_s) as clock:
                return await _list_all_tools(self.client)
        except Exception as error:
            return RuntimeError(f"no answer within {self._timeout_s:g} s") if clock.expired() else error

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
async def stdio_connection(streams: Any) -> AsyncGenerator[Client, None]:
    async with Client(streams) as client:
        yield client


@asynccontextmanager
async def http_connection(url: str, headers: dict[str, str]) -> AsyncGenerator[Client, None]:
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
