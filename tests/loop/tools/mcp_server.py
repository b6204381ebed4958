"""An MCP server for tests, built with the SDK; as a program it serves over stdio.

It sends events to the port in EVENT_PORT, one line each.
"""

from __future__ import annotations

import base64
import os
import socket

import anyio
from mcp.server.mcpserver import Image, MCPServer
from mcp.types import CallToolResult, EmbeddedResource, TextContent, TextResourceContents

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
server = MCPServer("tests", log_level="CRITICAL")


def send_event(line: str) -> None:
    with socket.create_connection(("127.0.0.1", int(os.environ["EVENT_PORT"]))) as connection:
        connection.sendall(f"{line}\n".encode())


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"{a} + {b} = {a + b}"


@server.tool(structured_output=False)
def picture() -> list[object]:
    """An image and a text."""
    return ["one pixel", Image(data=PIXEL, format="png")]


@server.tool()
def point(x: int) -> dict[str, int]:
    """Structured content."""
    return {"x": x}


@server.tool()
def refuse() -> CallToolResult:
    """Returns an error."""
    return CallToolResult(content=[TextContent(text="not today")], is_error=True)


@server.tool(structured_output=False)
def page() -> list[EmbeddedResource]:
    """A resource inside the result."""
    return [EmbeddedResource(resource=TextResourceContents(uri="file:///page", text="a page"))]


@server.tool()
def crash() -> str:
    """Raises."""
    raise RuntimeError("the server has a bug")


@server.tool()
async def wait() -> str:
    """Never returns; sends an event with its process id, and one when it is cancelled."""
    send_event(f"started {os.getpid()}")
    try:
        await anyio.sleep_forever()
    finally:
        send_event("cancelled")
    return "never"


@server.tool()
def exit() -> str:
    """Ends the process."""
    os._exit(3)


if __name__ == "__main__":
    server.run("stdio")
