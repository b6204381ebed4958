"""The control API: opens, reads, rewards and ends sessions; pauses the policy; adds and removes engines.

POST|GET /sessions        GET|DELETE /sessions/{id}, GET …/tree /timelines /samples /report /snapshot /wait
GET /sessions/{id}/samples?format=json|jsonl|tree, streamed
POST /sessions/{id}/reward|complete|finalize|abort      (the session's api_key may complete it)
POST /policy/pause · /policy/resume       GET|POST|DELETE /engines
GET /healthz (alive) · /readyz (can take calls) · /metrics · /openapi.json
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match, Route

from branchline.core.errors import BranchlineError, EngineError, MessageError
from branchline.core.reward import decode_json, read_rewards
from branchline.engines.replicas import Replicas
from branchline.gateway.access import AccessControl, ControlAction
from branchline.gateway.asgi import ClientDisconnectedError, bearer_key, read_body_parts, to_error_info
from branchline.gateway.config import GatewayConfig
from branchline.gateway.export_options import read_export_policy
from branchline.gateway.metrics import GatewayMetrics
from branchline.gateway.openapi import build_document
from branchline.gateway.other_endpoints import explain_path
from branchline.gateway.protocols.base import ErrorInfo
from branchline.gateway.protocols.chat import error_body
from branchline.gateway.session_reads import (
    READ_HANDLERS,
    SessionHandler,
    json_response,
    run_in_view_thread,
    stream_parts,
)
from branchline.gateway.views import gateway_index, sample_parts, session_view, trajectory_view
from branchline.runtime.headers import IDEMPOTENCY_HEADER
from branchline.runtime.managed_session import ManagedSession, SessionState, read_session_options
from branchline.runtime.message_cache import parse_json
from branchline.runtime.router import Router
from branchline.runtime.session_store import SessionStore

log = logging.getLogger("branchline.gateway")

Handler = Callable[[HttpRequest], Awaitable[Response]]

_RETURNS = ("samples", "trajectory", "session")
"""What `finalize` may return next to the session."""
_MAX_WAIT_S = 3600.0
_KEPT_ENGINE_REQUESTS = 1000
_ENGINE_CHECK_S = 1.0
"""How long `/readyz` repeats what it found out about the engine."""
_ENGINE_TIMEOUT_S = 2.0


class ControlApi:
    """Answers the programs that run agents and trainers; `asgi` is the application."""

    def __init__(
        self,
        router: Router,
        sessions: SessionStore,
        access: AccessControl,
        metrics: GatewayMetrics,
        config: GatewayConfig,
    ) -> None:
        self._router = router
        self._sessions = sessions
        self._access = access
        self._metrics = metrics
        self._config = config
        self._engine_requests: dict[str, asyncio.Task[None]] = {}
        """Changes of the engines by their idempotency keys, the oldest first."""
        self._openapi_document = b""
        self._engine_check: asyncio.Task[bool] | None = None
        self._engine_checked_at = 0.0
        self.asgi = Starlette(routes=self._routes(), exception_handlers={HTTPException: _routing_error})

    def _routes(self) -> list[Route]:
        admin, session = self._admin_route, self._session_route
        return [
            Route("/", self._index, methods=["GET"]),
            Route("/healthz", self._health, methods=["GET"]),
            Route("/readyz", self._ready, methods=["GET"]),
            Route("/metrics", self._render_metrics, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
            admin("POST", "/sessions", self._open),
            admin("GET", "/sessions", self._list),
            session("DELETE", "", self._delete),
            *(session("GET", path, handler) for path, handler in READ_HANDLERS.items()),
            session("GET", "/wait", self._wait),
            session("POST", "/reward", self._reward, "reward"),
            session("POST", "/complete", self._end_handler("completed"), "complete"),
            session("POST", "/abort", self._end_handler("aborted")),
            session("POST", "/finalize", self._finalize),
            admin("POST", "/policy/pause", self._pause),
            admin("POST", "/policy/resume", self._resume),
            admin("GET", "/engines", self._engines),
            admin("POST", "/engines", self._add_engine),
            admin("DELETE", "/engines", self._remove_engine),
        ]

    def _admin_route(self, method: str, path: str, handler: Handler) -> Route:
        async def authorized(http: HttpRequest) -> Response:
            self._access.require_admin(bearer_key(http.headers))
            return await handler(http)

        return Route(path, _with_error_responses(authorized), methods=[method])

    def _session_route(
        self, method: str, path: str, handler: SessionHandler, action: ControlAction = "control"
    ) -> Route:
        async def authorized(http: HttpRequest) -> Response:
            key = bearer_key(http.headers)
            return await handler(http, self._access.control_session(http.path_params["id"], key, action))

        return Route("/sessions/{id}" + path, _with_error_responses(authorized), methods=[method])

    # -- sessions ------------------------------------------------------------------------------------

    async def _open(self, http: HttpRequest) -> Response:
        options = read_session_options(await self._read_body(http))
        managed, api_key, control_key = await asyncio.to_thread(
            self._sessions.open, options, _idempotency_key(http), self._config.admin_key
        )
        root = (self._config.public_url or str(http.base_url)).rstrip("/") + f"/sessions/{managed.id}"
        urls = {"base_url": root + "/v1", "openai_base_url": root + "/v1", "anthropic_base_url": root}
        return json_response({"id": managed.id, **urls, "api_key": api_key, "control_key": control_key}, 201)

    async def _list(self, http: HttpRequest) -> Response:
        """The sessions in memory, oldest first, filtered by `state` and `group`."""
        filters = {name: http.query_params[name] for name in ("state", "group") if name in http.query_params}
        views = [
            view
            for view in map(session_view, self._sessions)
            if all(view[name] == value for name, value in filters.items())
        ]
        return json_response({"sessions": views})

    async def _delete(self, http: HttpRequest, managed: ManagedSession) -> Response:
        """Removes a closed session from memory; the journal keeps it."""
        self._sessions.evict(managed)
        return Response(status_code=204)

    async def _wait(self, http: HttpRequest, managed: ManagedSession) -> Response:
        """Answers when the session is no longer open, or after `timeout_s`."""
        value = http.query_params.get("timeout_s", "60")
        try:
            timeout_s = float(value)
        except ValueError:
            timeout_s = -1.0
        if not 0 <= timeout_s <= _MAX_WAIT_S:
            raise MessageError("timeout_s", value, f"a number of seconds from 0 to {_MAX_WAIT_S:g}")
        await self._sessions.wait_until_ended(managed, timeout_s)
        return json_response(session_view(managed))

    async def _reward(self, http: HttpRequest, managed: ManagedSession) -> Response:
        rewards = read_rewards(await self._read_body(http, _decode_reward), strict=True)
        by_agent = not self._access.may_read(managed, bearer_key(http.headers))
        await managed.post_rewards(rewards, _idempotency_key(http), by_agent=by_agent)
        return self._session_response(http, managed)

    def _end_handler(self, state: SessionState) -> SessionHandler:
        async def end(http: HttpRequest, managed: ManagedSession) -> Response:
            body = _check_fields(await self._read_body(http), "reason")
            await self._sessions.end_session(managed, state, str(body.get("reason", "")))
            return self._session_response(http, managed)

        return end

    async def _finalize(self, http: HttpRequest, managed: ManagedSession) -> Response:
        """Ends a session and returns it with its samples and report, its trajectory, or nothing else."""
        body = _check_fields(await self._read_body(http), "reason", "return", "policy")
        returned = body.get("return", "samples")
        if returned not in _RETURNS:
            raise MessageError("return", returned, "samples, trajectory or session")
        options = read_export_policy(body.get("policy", {}))
        # An invalid policy is refused before the session ends.
        options.policy(managed)
        await self._sessions.end_session(managed, "finalized", str(body.get("reason", "")))
        if returned == "samples":
            return await stream_parts(sample_parts(managed, options, has_session=True))
        if returned == "session":
            return json_response(session_view(managed))
        return await run_in_view_thread(
            lambda: json_response({**session_view(managed), "trajectory": trajectory_view(managed)})
        )

    def _session_response(self, http: HttpRequest, managed: ManagedSession) -> Response:
        """The session as the key may see it: an agent sees neither rewards nor metadata."""
        view = session_view(managed)
        if not self._access.may_read(managed, bearer_key(http.headers)):
            view = {name: view[name] for name in ("id", "state", "reason")}
        return json_response(view)

    # -- policy and engines --------------------------------------------------------------------------

    async def _pause(self, http: HttpRequest) -> Response:
        _check_fields(await self._read_body(http))
        await self._router.pause()
        return json_response(self._policy_state())

    async def _resume(self, http: HttpRequest) -> Response:
        await self._router.resume(_read_version(_check_fields(await self._read_body(http), "version")))
        return json_response(self._policy_state())

    async def _engines(self, http: HttpRequest) -> Response:
        return self._engines_response()

    async def _add_engine(self, http: HttpRequest) -> Response:
        """`version` is the version of the weights that the server has loaded."""
        body = _check_fields(await self._read_body(http), "url", "version")
        url, version = _required_string(body, "url"), _read_version(body)
        await self._run_once(http, lambda: self._router.add_replica(url, version))
        return self._engines_response(201)

    async def _remove_engine(self, http: HttpRequest) -> Response:
        body = _check_fields(await self._read_body(http), "name")
        name = _required_string(body, "name")
        await self._run_once(http, lambda: self._router.remove_replica(name))
        return self._engines_response()

    async def _run_once(self, http: HttpRequest, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs an action, unless a request with the same idempotency key has run it; an action that failed is
        run again."""
        key = _idempotency_key(http)
        task = self._engine_requests.get(key) if key else None
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(action())
            if key:
                self._engine_requests[key] = task
                if len(self._engine_requests) > _KEPT_ENGINE_REQUESTS:
                    self._engine_requests.pop(next(iter(self._engine_requests)))
        await asyncio.shield(task)

    def _engines_response(self, status: int = 200) -> Response:
        return json_response(self._policy_state() | {"engines": self._router.describe_replicas()}, status)

    def _policy_state(self) -> dict[str, Any]:
        return {"paused": self._router.paused, "version": self._router.version}

    # -- the gateway itself --------------------------------------------------------------------------

    async def _index(self, http: HttpRequest) -> Response:
        """Says what this is; it needs no key, so it says nothing about sessions and engines."""
        url = self._config.public_url.rstrip("/") or str(http.base_url).rstrip("/")
        return json_response(gateway_index(url))

    async def _health(self, http: HttpRequest) -> Response:
        """Answers if the process is alive; a failure means that it must be restarted."""
        return json_response({"status": "ok", **self._policy_state(), "sessions": len(self._sessions)})

    async def _ready(self, http: HttpRequest) -> Response:
        """Whether a call would be taken now; 503 if not. A restart would not help."""
        checks = {
            "journal": "cannot be written" if self._sessions.journal_failure else "ok",
            "engine": "ok" if await self._is_engine_reachable() else "does not answer",
            "policy": "paused" if self._router.paused else "ok",
        }
        is_ready = set(checks.values()) == {"ok"}
        return json_response(
            {"status": "ready" if is_ready else "not ready", "checks": checks}, 200 if is_ready else 503
        )

    async def _is_engine_reachable(self) -> bool:
        """Whether the server of the default engine answers, or that of one of its replicas. It is asked once
        in a while, however often this is called: the path needs no key."""
        now, check = asyncio.get_running_loop().time(), self._engine_check
        if check is None or (check.done() and now - self._engine_checked_at > _ENGINE_CHECK_S):
            check = self._engine_check = asyncio.create_task(self._reach_engine())
            self._engine_checked_at = now
        return await asyncio.shield(check)

    async def _reach_engine(self) -> bool:
        engine = self._router.default_engine
        engines = engine.engines if isinstance(engine, Replicas) else [engine]
        attempts = [asyncio.create_task(one.ready()) for one in engines]
        try:
            for attempt in asyncio.as_completed(attempts, timeout=_ENGINE_TIMEOUT_S):
                with suppress(EngineError):
                    await attempt
                    return True
        except TimeoutError:
            pass
        finally:
            for task in attempts:
                task.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
        return False

    async def _render_metrics(self, http: HttpRequest) -> Response:
        self._metrics.sessions.set(len(self._sessions))
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def _openapi(self, http: HttpRequest) -> Response:
        """The description of both APIs. It holds no secrets, so it needs no key."""
        if not self._openapi_document:
            self._openapi_document = build_document(self._config)
        return Response(self._openapi_document, media_type="application/json")

    async def _read_body(self, http: HttpRequest, decode: Callable[[bytes], Any] = parse_json) -> Any:
        """The decoded body, or None if there is none; it must be encodable for the journal."""
        if http.headers.get("content-length", "") in ("", "0") and "transfer-encoding" not in http.headers:
            return None
        body = decode(
            b"".join(await read_body_parts(http.receive, http.headers, self._config.max_body_bytes))
        )
        try:
            msgspec.msgpack.encode(body)
        except (OverflowError, RecursionError, UnicodeEncodeError) as error:
            raise MessageError("body", body, f"what can be recorded ({error})") from error
        return body


def _with_error_responses(handler: Handler) -> Handler:
    """Answers every error in one envelope."""

    async def guarded(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except BranchlineError as error:
            return _error_response(to_error_info(error))
        except ClientDisconnectedError:
            return Response(status_code=499)  # never received
        except Exception:
            log.exception("request failed")
            return _error_response(ErrorInfo(500, "internal error"))

    return guarded


async def _routing_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    message = f"{http.url.path}: no such path" + explain_path(http.url.path)
    if error.status_code == 405:
        # The exception's own header has the methods of the first matching route only.
        routes = [route for route in http.app.routes if route.matches(http.scope)[0] != Match.NONE]
        headers = {"allow": ", ".join(sorted({method for route in routes for method in route.methods}))}
        message = f"{http.method}: not for this path"
    return _error_response(ErrorInfo(error.status_code, message, headers=headers))


def _error_response(info: ErrorInfo) -> Response:
    return json_response(error_body(info), info.status, dict(info.headers))


def _check_fields(body: object, *names: str) -> dict[str, Any]:
    """The fields of a body, {} if there is none; a field that is not in `names` is an error."""
    fields = {} if body is None else body
    if not isinstance(fields, dict):
        raise MessageError("body", body, "an object")
    for name in fields:
        if name not in names:
            raise MessageError("field", name, f"only {', '.join(names)}" if names else "none")
    return fields


def _decode_reward(data: bytes) -> Any:
    """Returns the decoded body of a reward, read as strictly as the output of a verifier."""
    try:
        return decode_json(data)
    except ValueError as error:
        raise MessageError("body", data[:60], f"JSON ({error})") from error


def _idempotency_key(http: HttpRequest) -> str:
    key = http.headers.get(IDEMPOTENCY_HEADER, "")
    if key and not 16 <= len(key) <= 255:
        raise MessageError(IDEMPOTENCY_HEADER, key, "16 to 255 characters")
    return key


def _read_version(body: dict[str, Any]) -> int | None:
    version = body.get("version")
    if version is not None and (type(version) is not int or not 0 <= version < 2**31):
        raise MessageError("version", version, "a whole number from 0 to 2147483647")
    return version


def _required_string(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise MessageError(name, value, "a non-empty string")
    return value
