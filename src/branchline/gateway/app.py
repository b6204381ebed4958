"""The gateway as an ASGI application: routes, keys, errors. What a call does is in `calls`.

Only this room knows status codes. Sessions are named by their URL or by their API key alone; a session's
api_key opens its model API and nothing else, its control_key everything of that session, the admin key
everything.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from branchline.core.call import DEFAULT_AGENT
from branchline.core.errors import (
    BranchlineError,
    EngineError,
    InputError,
    JournalError,
    MessageError,
    SessionError,
)
from branchline.engines.base import Engine
from branchline.gateway import chat
from branchline.gateway.calls import Done, Event, Times, run_call
from branchline.gateway.live import LiveSession, SessionOptions, Sessions, keys_match
from branchline.gateway.metrics import Metrics
from branchline.gateway.views import report_view, samples_view, session_view, timelines_view, tree_view
from branchline.gateway.wire import error_of, gone, json_response, key_of, read_reward, refusal, user_of

log = logging.getLogger("branchline.gateway")


@dataclass(frozen=True)
class GatewayConfig:
    """How a gateway behaves."""

    admin_key: str = ""
    auth: bool = True
    max_in_flight: int = 256
    """Generations at once; above, 429 with Retry-After."""
    max_body_bytes: int = 64 * 1024 * 1024
    default_max_tokens: int = 4096


class _ClientGoneError(Exception):
    """Nobody is there to be answered."""


Handler = Callable[[HttpRequest], Awaitable[Response]]


class GatewayApp:
    """Routes of one gateway over one engine."""

    def __init__(self, engine: Engine, sessions: Sessions, config: GatewayConfig | None = None) -> None:
        self.engine = engine
        self.sessions = sessions
        self.config = config or GatewayConfig()
        self.base_url = ""
        self._in_flight = 0
        self.metrics = Metrics()
        self.asgi = Starlette(routes=self._routes())

    def _routes(self) -> list[Route]:
        model = [
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
        ]
        session = "/sessions/{id}"
        views = {
            "": session_view,
            "/tree": tree_view,
            "/timelines": timelines_view,
            "/samples": samples_view,
            "/report": report_view,
        }
        return [
            Route("/healthz", self._health, methods=["GET"]),
            Route("/metrics", self._guarded(self._metrics), methods=["GET"]),
            Route("/sessions", self._guarded(self._open), methods=["POST"]),
            *(
                Route(session + path, self._guarded(self._view(view)), methods=["GET"])
                for path, view in views.items()
            ),
            *(
                Route(f"{session}/{verb}", self._guarded(self._control(verb)), methods=["POST"])
                for verb in ("reward", "complete", "finalize", "abort")
            ),
            Route("/policy/pause", self._guarded(self._pause), methods=["POST"]),
            Route("/policy/resume", self._guarded(self._resume), methods=["POST"]),
            *model,
            *(
                Route(session + route.path, route.endpoint, methods=list(route.methods or ()))
                for route in model
            ),
        ]

    def _guarded(self, handler: Handler) -> Handler:
        """Every refusal in the protocol's own envelope; nothing else is ever sent."""

        async def guarded(http: HttpRequest) -> Response:
            try:
                return await handler(http)
            except BranchlineError as error:
                self.metrics.note_failure(
                    "failed" if isinstance(error, EngineError | JournalError) else "refused"
                )
                return refusal(error)
            except _ClientGoneError:
                return Response(status_code=499)
            except Exception:
                log.exception("request failed")
                return json_response(chat.error(500, "internal error"), 500)

        return guarded

    # -- keys ----------------------------------------------------------------------------------------

    def _is_admin(self, key: str) -> bool:
        admin = self.config.admin_key
        return not self.config.auth or bool(admin and hmac.compare_digest(key.encode(), admin.encode()))

    def _require_admin(self, http: HttpRequest) -> None:
        key = key_of(http)
        if not self._is_admin(key):
            raise SessionError("forbidden" if key else "no_key", "this needs the admin key")

    def _session(self, http: HttpRequest, *, control: bool, agent_may: bool = False) -> LiveSession:
        """The session a request is for, if its key opens it."""
        key = key_of(http)
        name = http.path_params.get("id")
        if name is None:
            live = self.sessions.by_api_key(key) if key else None
            if live is None:
                raise SessionError("forbidden" if key else "no_key", "this key opens no session")
            return live
        live = self.sessions.get(name)
        if self._is_admin(key) or keys_match(key, live.control_key_hash):
            return live
        if keys_match(key, live.api_key_hash) and (not control or (agent_may and live.options.agent_reward)):
            return live
        raise SessionError("forbidden" if key else "no_key", f"this key does not open that of session {name}")

    # -- model API -----------------------------------------------------------------------------------

    async def _chat(self, http: HttpRequest) -> Response:
        live = self._session(http, control=False)
        body = await self._body(http)
        agent = http.headers.get("x-branchline-agent") or user_of(body) or live.options.agent or DEFAULT_AGENT
        retry = http.headers.get("x-stainless-retry-count", "0")
        ask = chat.read(
            body,
            live.options,
            agent=agent,
            retry=int(retry) if retry.isdigit() else 0,
            default_max_tokens=self.config.default_max_tokens,
        )
        if self._in_flight >= self.config.max_in_flight:
            raise SessionError("busy", f"{self._in_flight} generations are under way, try again in a moment")
        call_id = "chatcmpl-" + secrets.token_hex(12)
        if ask.stream:
            return await self._streamed(live, ask, call_id)
        events = self._events(live, ask, call_id)
        done = await self._until_gone(http, self._finished(events))
        response = json_response(chat.whole(ask, done, live.session.codec))
        # A call counts as delivered once its answer has left, and not before.
        response.background = BackgroundTask(_drain, events)
        return response

    async def _finished(self, events: AsyncGenerator[Event, None]) -> Done:
        try:
            async for event in events:
                if isinstance(event, Done):
                    return event
            raise AssertionError("a call ended without Done")
        except BaseException:
            await events.aclose()
            raise

    async def _events(
        self, live: LiveSession, ask: chat.ChatAsk, call_id: str
    ) -> AsyncGenerator[Event, None]:
        """A call's events, counted."""
        times = Times()
        self._in_flight += 1
        self.metrics.in_flight.set(self._in_flight)
        try:
            async with aclosing(run_call(live, self.engine, ask.asked, call_id, times)) as events:
                async for event in events:
                    if isinstance(event, Done):
                        self.metrics.note_call(event, times)
                    yield event
        except (GeneratorExit, asyncio.CancelledError):
            self.metrics.note_failure("cancelled")
            raise
        finally:
            self._in_flight -= 1
            self.metrics.in_flight.set(self._in_flight)

    async def _until_gone(self, http: HttpRequest, work: Coroutine[Any, Any, Done]) -> Done:
        """The work's result; a client that hangs up before cancels it."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(gone(http))
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise _ClientGoneError
            return task.result()
        finally:
            watch.cancel()

    async def _streamed(self, live: LiveSession, ask: chat.ChatAsk, call_id: str) -> Response:
        events = self._events(live, ask, call_id)
        # The first event decides between an error with its status and a stream.
        first = await anext(events)
        stream = chat.Stream(ask, call_id, live.session.codec)

        async def lines() -> AsyncIterator[bytes]:
            try:
                async with aclosing(events):
                    event = first
                    while True:
                        told = stream.end(event) if isinstance(event, Done) else stream.said(event)
                        for data in told:
                            yield b"data: " + msgspec.json.encode(data) + b"\n\n"
                        if isinstance(event, Done):
                            break
                        event = await anext(events)
                    yield b"data: [DONE]\n\n"
                    async for _ in events:
                        pass
            except BranchlineError as error:
                status, body, _ = error_of(error)
                yield b"data: " + msgspec.json.encode({**body, "status": status}) + b"\n\n"

        return StreamingResponse(
            lines(), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )

    async def _models(self, http: HttpRequest) -> Response:
        self._session(http, control=False)
        return json_response(chat.models([self.engine.name, "branchline"]))

    # -- control API ---------------------------------------------------------------------------------

    async def _health(self, http: HttpRequest) -> Response:
        return json_response(
            {
                "status": "ok",
                "engine": self.engine.name,
                "version": self.engine.version,
                "sessions": len(self.sessions),
            }
        )

    async def _metrics(self, http: HttpRequest) -> Response:
        self.metrics.sessions.set(len(self.sessions))
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _open(self, http: HttpRequest) -> Response:
        self._require_admin(http)
        body = await self._body(http, optional=True)
        try:
            options = msgspec.convert(body or {}, SessionOptions)
        except msgspec.ValidationError as error:
            raise InputError(str(error)) from error
        live, api_key, control_key = await asyncio.to_thread(self.sessions.open, options)
        root = (self.base_url or str(http.base_url)).rstrip("/") + f"/sessions/{live.id}"
        urls = {"base_url": root + "/v1", "openai_base_url": root + "/v1", "anthropic_base_url": root}
        return json_response({"id": live.id, **urls, "api_key": api_key, "control_key": control_key}, 201)

    def _view(self, view: Callable[[LiveSession], dict[str, Any]]) -> Handler:
        async def show(http: HttpRequest) -> Response:
            live = self._session(http, control=True)

            def read() -> dict[str, Any]:
                with live.session.reading():
                    return view(live)

            return json_response(await asyncio.to_thread(read))

        return show

    def _control(self, verb: str) -> Handler:
        async def control(http: HttpRequest) -> Response:
            live = self._session(http, control=True, agent_may=verb == "reward")
            body = await self._body(http, optional=True)
            if verb == "reward":
                durable = live.post_reward(read_reward(body))
            else:
                states = {"complete": "completed", "finalize": "finalized", "abort": "aborted"}
                reason = body.get("reason", "") if isinstance(body, dict) else ""
                was_closed = live.is_closed
                durable = live.end(states[verb], str(reason))  # type: ignore[arg-type]
                if live.is_closed and not was_closed:
                    await asyncio.to_thread(self.metrics.note_end, live)
            if durable is not None:
                await asyncio.wrap_future(durable)
            return json_response(session_view(live))

        return control

    async def _pause(self, http: HttpRequest) -> Response:
        self._require_admin(http)
        await self.engine.pause()
        return json_response({"paused": True, "version": self.engine.version})

    async def _resume(self, http: HttpRequest) -> Response:
        self._require_admin(http)
        body = await self._body(http, optional=True)
        version = body.get("version") if isinstance(body, dict) else None
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise MessageError("version", version, "a whole number")
        await self.engine.resume(version)
        return json_response({"paused": False, "version": self.engine.version})

    async def _body(self, http: HttpRequest, *, optional: bool = False) -> Any:
        data = bytearray()
        async for part in http.stream():
            data += part
            if len(data) > self.config.max_body_bytes:
                raise MessageError(
                    "body", f"more than {len(data)} bytes", f"at most {self.config.max_body_bytes} bytes"
                )
        if not data and optional:
            return None
        try:
            return msgspec.json.decode(bytes(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError("body", bytes(data[:60]), f"JSON ({error})") from error


async def _drain(events: AsyncGenerator[Event, None]) -> None:
    async for _ in events:
        pass
