"""The control API: sessions are opened, read, paid and ended here; the policy is paused; engines come and go.

POST|GET /sessions        GET|DELETE /sessions/{id}, GET …/tree /timelines /samples /report /wait
POST /sessions/{id}/reward|complete|finalize|abort
POST /policy/pause · /policy/resume       GET|POST|DELETE /engines
GET /healthz · /metrics
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match, Route

from branchline.core.errors import BranchlineError, MessageError
from branchline.gateway.access import Access
from branchline.gateway.config import GatewayConfig
from branchline.gateway.exchange import ClientGoneError, Exchange
from branchline.gateway.fleet import Fleet
from branchline.gateway.live import LiveSession, State, read_options
from branchline.gateway.metrics import Metrics
from branchline.gateway.protocols.chat import error
from branchline.gateway.record import SessionObserver
from branchline.gateway.sessions import Sessions
from branchline.gateway.views import report_view, samples_view, session_view, timelines_view, tree_view
from branchline.gateway.wire import code_of, error_of, json_response

log = logging.getLogger("branchline.gateway")

Handler = Callable[[HttpRequest], Awaitable[Response]]
View = Callable[[LiveSession], dict[str, Any]]

_VIEWS: dict[str, View] = {
    "": session_view,
    "/tree": tree_view,
    "/timelines": timelines_view,
    "/samples": samples_view,
    "/report": report_view,
}
_ENDS: dict[str, State] = {"complete": "completed", "finalize": "finalized", "abort": "aborted"}
_LONGEST_WAIT_S = 3600.0


class ControlApi:
    """Answers those who run agents and trainers."""

    def __init__(
        self,
        fleet: Fleet,
        sessions: Sessions,
        access: Access,
        metrics: Metrics,
        config: GatewayConfig,
        on_end: Sequence[SessionObserver] = (),
    ) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._access = access
        self._metrics = metrics
        self._config = config
        self._on_end = on_end
        self.stopping = asyncio.Event()
        """Set when the gateway stops: whoever waits for something is answered."""
        self.asgi = Starlette(routes=self._routes(), exception_handlers={HTTPException: _no_such_route})

    def _routes(self) -> list[Route]:
        one = "/sessions/{id}"

        def route(path: str, handler: Handler, method: str) -> Route:
            return Route(path, _guarded(handler), methods=[method])

        return [
            Route("/healthz", self._health, methods=["GET"]),
            route("/metrics", self._metrics_text, "GET"),
            route("/sessions", self._open, "POST"),
            route("/sessions", self._list, "GET"),
            route(one, self._forget, "DELETE"),
            *(route(one + path, self._view(view), "GET") for path, view in _VIEWS.items()),
            route(one + "/wait", self._wait, "GET"),
            route(one + "/reward", self._reward, "POST"),
            *(route(f"{one}/{verb}", self._end(state), "POST") for verb, state in _ENDS.items()),
            route("/policy/pause", self._pause, "POST"),
            route("/policy/resume", self._resume, "POST"),
            route("/engines", self._engines, "GET"),
            route("/engines", self._add_engine, "POST"),
            route("/engines", self._remove_engine, "DELETE"),
        ]

    # -- sessions ------------------------------------------------------------------------------------

    async def _open(self, http: HttpRequest) -> Response:
        self._access.require_admin(_key(http))
        options = read_options(await self._body(http))
        live, api_key, control_key = await asyncio.to_thread(self._sessions.open, options)
        root = (self._config.public_url or str(http.base_url)).rstrip("/") + f"/sessions/{live.id}"
        urls = {"base_url": root + "/v1", "openai_base_url": root + "/v1", "anthropic_base_url": root}
        return json_response({"id": live.id, **urls, "api_key": api_key, "control_key": control_key}, 201)

    async def _list(self, http: HttpRequest) -> Response:
        """What is in memory, oldest first; `state` and `group` choose."""
        self._access.require_admin(_key(http))
        wanted = {name: http.query_params[name] for name in ("state", "group") if name in http.query_params}
        shown = [
            view
            for view in map(session_view, self._sessions)
            if all(view[name] == value for name, value in wanted.items())
        ]
        return json_response({"sessions": shown})

    async def _forget(self, http: HttpRequest) -> Response:
        """Lets go of a closed session's memory; a journal keeps what it has."""
        live = self._access.control(http.path_params["id"], _key(http))
        self._sessions.forget(live)
        return Response(status_code=204)

    def _view(self, view: View) -> Handler:
        async def show(http: HttpRequest) -> Response:
            live = self._access.control(http.path_params["id"], _key(http))
            return await asyncio.to_thread(lambda: json_response(view(live)))

        return show

    async def _wait(self, http: HttpRequest) -> Response:
        """Answers when the session is no longer open, or after `timeout_s`, whatever its state is then."""
        live = self._access.control(http.path_params["id"], _key(http))
        given = http.query_params.get("timeout_s", "60")
        try:
            timeout_s = float(given)
        except ValueError:
            timeout_s = -1.0
        if not 0 <= timeout_s <= _LONGEST_WAIT_S:
            raise MessageError("timeout_s", given, f"a number of seconds from 0 to {_LONGEST_WAIT_S:g}")
        await self.wait(live, timeout_s)
        return json_response(session_view(live))

    async def wait(self, live: LiveSession, timeout_s: float | None) -> None:
        """Until a session is no longer open, the gateway stops, or the time is over."""
        waits = [asyncio.ensure_future(event.wait()) for event in (live.left_open, self.stopping)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _reward(self, http: HttpRequest) -> Response:
        live = self._access.control(http.path_params["id"], _key(http), is_reward=True)
        await live.post_reward(await self._body(http))
        return json_response(session_view(live))

    def _end(self, state: State) -> Handler:
        async def end(http: HttpRequest) -> Response:
            live = self._access.control(http.path_params["id"], _key(http))
            body = await self._body(http)
            reason = body.get("reason", "") if isinstance(body, dict) else ""
            await self.end(live, state, str(reason))
            return json_response(session_view(live))

        return end

    async def end(self, live: LiveSession, state: State, reason: str = "") -> None:
        """Moves a session on; one that is closed for good is let go of by its engine and counted."""
        was_closed = live.is_closed
        await live.end(state, reason)
        if live.is_closed and not was_closed:
            self._fleet.forget(live.id)
            self._sessions.note_closed(live)
            self.tell_ended(live)
            await asyncio.to_thread(self._metrics.note_end, live)

    def tell_ended(self, live: LiveSession) -> None:
        for observe in self._on_end:
            observe(live)

    async def expire(self) -> None:
        """Finalizes the sessions that nobody has used for too long."""
        for live in self._sessions.idle(self._config.idle_s):
            if not live.is_idle(self._config.idle_s):
                continue  # used again while others were being ended
            log.info("session expired", extra={"session": live.id, "idle_s": self._config.idle_s})
            await self.end(live, "finalized", f"idle for {self._config.idle_s:g} s")

    # -- policy and engines --------------------------------------------------------------------------

    async def _pause(self, http: HttpRequest) -> Response:
        self._access.require_admin(_key(http))
        _only(await self._body(http))
        await self._fleet.pause()
        return json_response(self._policy())

    async def _resume(self, http: HttpRequest) -> Response:
        self._access.require_admin(_key(http))
        await self._fleet.resume(_version(_only(await self._body(http), "version")))
        return json_response(self._policy())

    async def _engines(self, http: HttpRequest) -> Response:
        self._access.require_admin(_key(http))
        return json_response(self._policy() | {"engines": self._fleet.replicas()})

    async def _add_engine(self, http: HttpRequest) -> Response:
        """The version is the one of the weights that the server has."""
        self._access.require_admin(_key(http))
        body = _only(await self._body(http), "url", "version")
        await self._fleet.add(_text(body, "url"), _version(body))
        return json_response(self._policy() | {"engines": self._fleet.replicas()}, 201)

    async def _remove_engine(self, http: HttpRequest) -> Response:
        self._access.require_admin(_key(http))
        await self._fleet.remove(_text(_only(await self._body(http), "name"), "name"))
        return json_response(self._policy() | {"engines": self._fleet.replicas()})

    def _policy(self) -> dict[str, Any]:
        return {"paused": self._fleet.paused, "version": self._fleet.version}

    # -- the gateway itself --------------------------------------------------------------------------

    async def _health(self, http: HttpRequest) -> Response:
        return json_response(
            {
                "status": "ok",
                "engine": self._fleet.name,
                **self._policy(),
                "sessions": len(self._sessions),
            }
        )

    async def _metrics_text(self, http: HttpRequest) -> Response:
        self._metrics.sessions.set(len(self._sessions))
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _body(self, http: HttpRequest) -> Any:
        """The body, if there is one: most of these requests can do without. It must fit a journal."""
        if http.headers.get("content-length", "") in ("", "0") and "transfer-encoding" not in http.headers:
            return None
        body = await Exchange(http.scope, http.receive, http._send).json(self._config.max_body_bytes)
        try:
            msgspec.msgpack.encode(body)
        except (OverflowError, RecursionError) as problem:
            raise MessageError("body", body, f"what can be recorded ({problem})") from problem
        return body


def _guarded(handler: Handler) -> Handler:
    """Every refusal in one envelope; nothing else is ever sent."""

    async def guarded(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except BranchlineError as refused:
            status, message, field, headers = error_of(refused)
            return json_response(error(status, message, field, code_of(refused)), status, headers)
        except ClientGoneError:
            return Response(status_code=499)  # nobody will see it
        except Exception:
            log.exception("request failed")
            return json_response(error(500, "internal error"), 500)

    return guarded


async def _no_such_route(http: HttpRequest, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    status, headers = problem.status_code, dict(problem.headers or {})
    if status == 405:
        fitting = [route for route in http.app.routes if route.matches(http.scope)[0] != Match.NONE]
        # The one that came with it knows the methods of the first route only.
        headers = {"allow": ", ".join(sorted({method for route in fitting for method in route.methods}))}
    words = f"{http.method}: not for this path" if status == 405 else f"{http.url.path}: no such path"
    return json_response(error(status, words), status, headers)


def _key(http: HttpRequest) -> str:
    return Exchange(http.scope, http.receive, http._send).key


def _only(body: object, *names: str) -> dict[str, Any]:
    """The fields of a body, if there is one; a field that nobody reads is a mistake of its writer."""
    fields = {} if body is None else body
    if not isinstance(fields, dict):
        raise MessageError("body", body, "an object")
    for name in fields:
        if name not in names:
            raise MessageError("field", name, f"only {', '.join(names)}" if names else "none")
    return fields


def _version(body: dict[str, Any]) -> int | None:
    version = body.get("version")
    if version is not None and (type(version) is not int or not 0 <= version < 2**31):
        raise MessageError("version", version, "a whole number from 0 to 2147483647")
    return version


def _text(body: object, name: str) -> str:
    value = body.get(name) if isinstance(body, dict) else None
    if not isinstance(value, str) or not value:
        raise MessageError(name, value, "a text that is not empty")
    return value
