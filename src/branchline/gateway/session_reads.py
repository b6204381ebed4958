"""The requests of the control API that read a session: its views, samples, report and snapshot.

They are built in threads of their own, so that reading sessions does not take the threads that prepare
prompts. Samples are streamed, and built as fast as the client reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from branchline.gateway.export_options import SampleFormat, read_export_query, read_sample_format
from branchline.gateway.views import report_view, sample_parts, session_view, timelines_view, tree_view
from branchline.runtime.managed_session import ManagedSession

SessionHandler = Callable[[HttpRequest, ManagedSession], Awaitable[Response]]
View = Callable[[ManagedSession], dict[str, Any]]
Made = TypeVar("Made")

_SNAPSHOT_TYPE = "application/vnd.msgpack"
_view_threads = ThreadPoolExecutor(2, thread_name_prefix="branchline-control")
"""Few, and not those that prepare prompts: reading sessions must not delay calls."""
_MEDIA_TYPES: dict[SampleFormat, str] = {
    "json": "application/json",
    "jsonl": "application/jsonl",
    "tree": "application/jsonl",
}
_STREAM_BYTES = 256 * 1024
"""How much of a streamed body is built at once."""


async def run_in_view_thread(make: Callable[[], Made]) -> Made:
    """Returns what `make` returns. Exports hold the interpreter for long, so they share few threads."""
    return await asyncio.get_running_loop().run_in_executor(_view_threads, make)


def _view_handler(view: View) -> SessionHandler:
    async def show(_http: HttpRequest, managed: ManagedSession) -> Response:
        return await run_in_view_thread(lambda: json_response(view(managed)))

    return show


async def _snapshot(_http: HttpRequest, managed: ManagedSession) -> Response:
    """The whole session in one answer, for `Client`."""
    content = await run_in_view_thread(lambda: managed.snapshot().encode())
    return Response(content, media_type=_SNAPSHOT_TYPE)


async def _report(http: HttpRequest, managed: ManagedSession) -> Response:
    options = read_export_query(http.query_params.multi_items())
    return await run_in_view_thread(lambda: json_response(report_view(managed, options)))


async def _samples(http: HttpRequest, managed: ManagedSession) -> Response:
    """Streams the samples. They are built in a thread, as fast as the client reads them."""
    params = http.query_params.multi_items()
    format = read_sample_format(params, http.headers.get("accept", ""))
    options = read_export_query([(name, value) for name, value in params if name != "format"])
    parts = sample_parts(managed, options, format)
    first = await run_in_view_thread(lambda: _next_bytes(parts))  # an error is still a response of its own

    async def body() -> AsyncIterator[bytes]:
        data = first
        while data:
            yield data
            data = await run_in_view_thread(lambda: _next_bytes(parts))

    return StreamingResponse(body(), media_type=_MEDIA_TYPES[format])


def _next_bytes(parts: Iterator[bytes]) -> bytes:
    """The next parts together, up to about 256 kB; empty at the end."""
    taken: list[bytes] = []
    size = 0
    for part in parts:
        taken.append(part)
        size += len(part)
        if size >= _STREAM_BYTES:
            break
    return b"".join(taken)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


READ_HANDLERS: Mapping[str, SessionHandler] = {
    "": _view_handler(session_view),
    "/tree": _view_handler(tree_view),
    "/timelines": _view_handler(timelines_view),
    "/snapshot": _snapshot,
    "/samples": _samples,
    "/report": _report,
}
"""The handlers by the path after `/sessions/{id}`."""
