"""The requests of the control API that read a session: its views, samples, report and snapshot.

They are built in a thread of their own, so that reading sessions does not take the threads that prepare
prompts. What may be large is streamed, and built as fast as the client reads it and the event loop has time:
between a few samples the thread waits until the event loop has run everything that is ready. If it only gave
way when the interpreter makes it, every call would take its turns with an export.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from branchline.gateway.export_options import SampleFormat, read_export_query, read_sample_format
from branchline.gateway.views import report_view, sample_parts, session_view, timeline_parts, tree_parts
from branchline.runtime.managed_session import ManagedSession

SessionHandler = Callable[[HttpRequest, ManagedSession], Awaitable[Response]]
Result = TypeVar("Result")

_SNAPSHOT_TYPE = "application/vnd.msgpack"
_view_thread = ThreadPoolExecutor(1, thread_name_prefix="branchline-control")
"""One, and not one of those that prepare prompts: reading sessions must not delay calls."""
_MEDIA_TYPES: dict[SampleFormat, str] = {
    "json": "application/json",
    "jsonl": "application/jsonl",
    "tree": "application/jsonl",
}
_STREAM_BYTES = 256 * 1024
"""How much of a streamed body is built at once."""
_BUILD_S = 0.001
"""How long samples are built before the event loop runs."""
_LOOP_WAIT_S = 1.0
"""How long a thread waits for an event loop, which may have stopped."""


async def run_in_view_thread(make: Callable[[], Result]) -> Result:
    """Returns what `make` returns. Exports hold the interpreter for long, so they share one thread."""
    return await asyncio.get_running_loop().run_in_executor(_view_thread, make)


async def _session(_http: HttpRequest, managed: ManagedSession) -> Response:
    return json_response(session_view(managed))


async def _tree(_http: HttpRequest, managed: ManagedSession) -> Response:
    return await stream_parts(tree_parts(managed))


async def _timelines(_http: HttpRequest, managed: ManagedSession) -> Response:
    return await stream_parts(timeline_parts(managed))


async def _snapshot(_http: HttpRequest, managed: ManagedSession) -> Response:
    """The whole session in one answer, for `Client`."""
    content = await run_in_view_thread(lambda: managed.snapshot().encode())
    return Response(content, media_type=_SNAPSHOT_TYPE)


async def _report(http: HttpRequest, managed: ManagedSession) -> Response:
    options = read_export_query(http.query_params.multi_items())
    return await run_in_view_thread(lambda: json_response(report_view(managed, options)))


async def _samples(http: HttpRequest, managed: ManagedSession) -> Response:
    params = http.query_params.multi_items()
    format = read_sample_format(params, http.headers.get("accept", ""))
    options = read_export_query([(name, value) for name, value in params if name != "format"])
    return await stream_parts(sample_parts(managed, options, format), _MEDIA_TYPES[format])


async def stream_parts(built: Iterator[bytes], media_type: str = "application/json") -> Response:
    """Sends parts that are built in a thread, as fast as the client reads them."""
    parts = _in_turns(built, asyncio.get_running_loop())
    first = await run_in_view_thread(lambda: _next_bytes(parts))  # an error is still a response of its own

    async def body() -> AsyncIterator[bytes]:
        data = first
        while data:
            yield data
            data = await run_in_view_thread(lambda: _next_bytes(parts))

    return StreamingResponse(body(), media_type=media_type)


def _in_turns(parts: Iterator[bytes], loop: asyncio.AbstractEventLoop) -> Iterator[bytes]:
    """Yields the parts; every millisecond of work it waits until the event loop has run all that is ready."""
    begun_at = time.perf_counter()
    for part in parts:
        yield part
        if time.perf_counter() - begun_at > _BUILD_S:
            has_run = threading.Event()
            loop.call_soon_threadsafe(has_run.set)
            has_run.wait(_LOOP_WAIT_S)
            begun_at = time.perf_counter()


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
    "": _session,
    "/tree": _tree,
    "/timelines": _timelines,
    "/snapshot": _snapshot,
    "/samples": _samples,
    "/report": _report,
}
"""The handlers by the path after `/sessions/{id}`."""
