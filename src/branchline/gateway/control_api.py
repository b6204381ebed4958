"""The control API: sessions are opened, read, paid and ended here; the policy is paused; engines come and go.

POST|GET /sessions        GET|DELETE /sessions/{id}, GET …/tree /timelines /samples /report /wait
POST /sessions/{id}/reward|complete|finalize|abort
POST /policy/pause · /policy/resume       GET|POST|DELETE /engines
GET /healthz · /metrics
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match, Route

from branchline.core.errors import BranchlineError, MessageError
from branchline.gateway.access import AccessControl
from branchline.gateway.asgi_request import AsgiRequest, ClientDisconnectedError
from branchline.gateway.config import GatewayConfig
from branchline.gateway.http_errors import error_code, http_error, json_response
from branchline.gateway.metrics import GatewayMetrics
from branchline.gateway.protocols.chat import error_body
from branchline.gateway.views import report_view, samples_view, session_view, timelines_view, tree_view
from branchline.runtime.managed_session import ManagedSession, SessionState, read_session_options
from branchline.runtime.router import Router
from branchline.runtime.session_store import SessionStore

log = logging.getLogger("branchline.gateway")

Handler = Callable[[HttpRequest], Awaitable[Response]]
View = Callable[[ManagedSession], dict[str, Any]]

_VIEWS: dict[str, View] = {
    "": session_view,
    "/tree": tree_view,
    "/timelines": timelines_view,
    "/samples": samples_view,
    "/report": report_view,
}
_STATES_BY_VERB: dict[str, SessionState] = {
    "complete": "completed",
    "finalize": "finalized",
    "abort": "aborted",
}
_MAX_WAIT_S = 3600.0


class ControlApi:
    """Answers those who run agents and trainers."""

    def __init__(
        self,
        fleet: Router,
        sessions: SessionStore,
        access: AccessControl,
        metrics: GatewayMetrics,
        config: GatewayConfig,
    ) -> None:
        self._router = fleet
        self._sessions = sessions
        self._access = access
        self._metrics = metrics
        self._config = config
        self.asgi = Starlette(routes=self._routes(), exception_handlers={HTTPException: _routing_error})

    def _routes(self) -> list[Route]:
        one = "/sessions/{id}"

        def route(path: str, handler: Handler, method: str) -> Route:
            return Route(path, _with_error_responses(handler), methods=[method])

        return [
            Route("/healthz", self._health, methods=["GET"]),
            route("/metrics", self._metrics_text, "GET"),
            route("/sessions", self._open, "POST"),
            route("/sessions", self._list, "GET"),
            route(one, self._delete, "DELETE"),
            *(route(one + path, self._view_handler(view), "GET") for path, view in _VIEWS.items()),
            route(one + "/wait", self._wait, "GET"),
            route(one + "/reward", self._reward, "POST"),
            *(
                route(f"{one}/{verb}", self._end_handler(state), "POST")
                for verb, state in _STATES_BY_VERB.items()
            ),
            route("/policy/pause", self._pause, "POST"),
            route("/policy/resume", self._resume, "POST"),
            route("/engines", self._engines, "GET"),
            route("/engines", self._add_engine, "POST"),
            route("/engines", self._remove_engine, "DELETE"),
        ]

    # -- sessions ------------------------------------------------------------------------------------

    async def _open(self, http: HttpRequest) -> Response:
        self._access.require_admin(_api_key(http))
        options = read_session_options(await self._read_body(http))
        live, api_key, control_key = await asyncio.to_thread(self._sessions.open, options)
        root = (self._config.public_url or str(http.base_url)).rstrip("/") + f"/sessions/{live.id}"
        urls = {"base_url": root + "/v1", "openai_base_url": root + "/v1", "anthropic_base_url": root}
        return json_response({"id": live.id, **urls, "api_key": api_key, "control_key": control_key}, 201)

    async def _list(self, http: HttpRequest) -> Response:
        """What is in memory, oldest first; `state` and `group` choose."""
        self._access.require_admin(_api_key(http))
        wanted = {name: http.query_params[name] for name in ("state", "group") if name in http.query_params}
        shown = [
            view
            for view in map(session_view, self._sessions)
            if all(view[name] == value for name, value in wanted.items())
        ]
        return json_response({"sessions": shown})

    async def _delete(self, http: HttpRequest) -> Response:
        """Lets go of a closed session's memory; a journal keeps what it has."""
        live = self._access.control_session(http.path_params["id"], _api_key(http))
        self._sessions.evict(live)
        return Response(status_code=204)

    def _view_handler(self, view: View) -> Handler:
        async def show(http: HttpRequest) -> Response:
            live = self._access.control_session(http.path_params["id"], _api_key(http))
            return await asyncio.to_thread(lambda: json_response(view(live)))

        return show

    async def _wait(self, http: HttpRequest) -> Response:
        """Answers when the session is no longer open, or after `timeout_s`, whatever its state is then."""
        live = self._access.control_session(http.path_params["id"], _api_key(http))
        given = http.query_params.get("timeout_s", "60")
        try:
            timeout_s = float(given)
        except ValueError:
            timeout_s = -1.0
        if not 0 <= timeout_s <= _MAX_WAIT_S:
            raise MessageError("timeout_s", given, f"a number of seconds from 0 to {_MAX_WAIT_S:g}")
        await self._sessions.wait_until_ended(live, timeout_s)
        return json_response(session_view(live))

    async def _reward(self, http: HttpRequest) -> Response:
        live = self._access.control_session(http.path_params["id"], _api_key(http), is_reward=True)
        await live.post_reward(await self._read_body(http))
        return json_response(session_view(live))

    def _end_handler(self, state: SessionState) -> Handler:
        async def end(http: HttpRequest) -> Response:
            live = self._access.control_session(http.path_params["id"], _api_key(http))
            body = await self._read_body(http)
            reason = body.get("reason", "") if isinstance(body, dict) else ""
            await self._sessions.end_session(live, state, str(reason))
            return json_response(session_view(live))

        return end

    # -- policy and engines --------------------------------------------------------------------------

    async def _pause(self, http: HttpRequest) -> Response:
        self._access.require_admin(_api_key(http))
        _checked_fields(await self._read_body(http))
        await self._router.pause()
        return json_response(self._policy_state())

    async def _resume(self, http: HttpRequest) -> Response:
        self._access.require_admin(_api_key(http))
        await self._router.resume(_read_version(_checked_fields(await self._read_body(http), "version")))
        return json_response(self._policy_state())

    async def _engines(self, http: HttpRequest) -> Response:
        self._access.require_admin(_api_key(http))
        return json_response(self._policy_state() | {"engines": self._router.describe_replicas()})

    async def _add_engine(self, http: HttpRequest) -> Response:
        """The version is the one of the weights that the server has."""
        self._access.require_admin(_api_key(http))
        body = _checked_fields(await self._read_body(http), "url", "version")
        await self._router.add_replica(_required_string(body, "url"), _read_version(body))
        return json_response(self._policy_state() | {"engines": self._router.describe_replicas()}, 201)

    async def _remove_engine(self, http: HttpRequest) -> Response:
        self._access.require_admin(_api_key(http))
        await self._router.remove_replica(
            _required_string(_checked_fields(await self._read_body(http), "name"), "name")
        )
        return json_response(self._policy_state() | {"engines": self._router.describe_replicas()})

    def _policy_state(self) -> dict[str, Any]:
        return {"paused": self._router.paused, "version": self._router.version}

    # -- the gateway itself --------------------------------------------------------------------------

    async def _health(self, http: HttpRequest) -> Response:
        return json_response(
            {
                "status": "ok",
                "engine": self._router.name,
                **self._policy_state(),
                "sessions": len(self._sessions),
            }
        )

    async def _metrics_text(self, http: HttpRequest) -> Response:
        self._metrics.sessions.set(len(self._sessions))
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def _read_body(self, http: HttpRequest) -> Any:
        """The body, if there is one: most of these requests can do without. It must fit a journal."""
        if http.headers.get("content-length", "") in ("", "0") and "transfer-encoding" not in http.headers:
            return None
        body = await AsgiRequest(http.scope, http.receive, http._send).read_json(self._config.max_body_bytes)
        try:
            msgspec.msgpack.encode(body)
        except (OverflowError, RecursionError) as problem:
            raise MessageError("body", body, f"what can be recorded ({problem})") from problem
        return body


def _with_error_responses(handler: Handler) -> Handler:
    """Every refusal in one envelope; nothing else is ever sent."""

    async def guarded(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except BranchlineError as refused:
            status, message, field, headers = http_error(refused)
            return json_response(error_body(status, message, field, error_code(refused)), status, headers)
        except ClientDisconnectedError:
            return Response(status_code=499)  # nobody will see it
        except Exception:
            log.exception("request failed")
            return json_response(error_body(500, "internal error"), 500)

    return guarded


async def _routing_error(http: HttpRequest, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    status, headers = problem.status_code, dict(problem.headers or {})
    if status == 405:
        fitting = [route for route in http.app.routes if route.matches(http.scope)[0] != Match.NONE]
        # The one that came with it knows the methods of the first route only.
        headers = {"allow": ", ".join(sorted({method for route in fitting for method in route.methods}))}
    words = f"{http.method}: not for this path" if status == 405 else f"{http.url.path}: no such path"
    return json_response(error_body(status, words), status, headers)


def _api_key(http: HttpRequest) -> str:
    return AsgiRequest(http.scope, http.receive, http._send).api_key


def _checked_fields(body: object, *names: str) -> dict[str, Any]:
    """The fields of a body, if there is one; a field that nobody reads is a mistake of its writer."""
    fields = {} if body is None else body
    if not isinstance(fields, dict):
        raise MessageError("body", body, "an object")
    for name in fields:
        if name not in names:
            raise MessageError("field", name, f"only {', '.join(names)}" if names else "none")
    return fields


def _read_version(body: dict[str, Any]) -> int | None:
    version = body.get("version")
    if version is not None and (type(version) is not int or not 0 <= version < 2**31):
        raise MessageError("version", version, "a whole number from 0 to 2147483647")
    return version


def _required_string(body: object, name: str) -> str:
    value = body.get(name) if isinstance(body, dict) else None
    if not isinstance(value, str) or not value:
        raise MessageError(name, value, "a text that is not empty")
    return value
