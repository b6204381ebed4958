"""The model API: finds session, protocol and engine of a request, then answers it whole or as a stream.

/v1/chat/completions                                the key identifies the session
/sessions/{id}/v1/chat/completions                  the URL does
/sessions/{id}/agents/{agent}/v1/chat/completions   and the agent too
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs, unquote

from branchline.core.call import DEFAULT_AGENT
from branchline.core.errors import (
    BranchlineError,
    CompactionError,
    EngineError,
    JournalError,
    MessageError,
    SessionError,
)
from branchline.engines.upstream_chat import UpstreamChat
from branchline.gateway.access import AccessControl
from branchline.gateway.asgi import (
    AsgiRequest,
    ClientDisconnectedError,
    StreamWriter,
    bearer_key,
    find_addresses,
    identify_agent,
    read_body_parts,
    to_agent_error_info,
    to_error_info,
)
from branchline.gateway.config import GatewayConfig
from branchline.gateway.image_urls import ImageFetcher
from branchline.gateway.other_endpoints import WEBSOCKET_ERROR, explain_endpoint
from branchline.gateway.protocols import chat, messages
from branchline.gateway.protocols.base import ErrorInfo, ParsedRequest, RequestContext, WireProtocol
from branchline.gateway.protocols.chat import CHAT
from branchline.gateway.protocols.completions import COMPLETIONS
from branchline.gateway.protocols.messages import MESSAGES
from branchline.gateway.protocols.responses import RESPONSES
from branchline.gateway.protocols.responses_output import ResponsesStream
from branchline.gateway.stored_responses import StoredResponses
from branchline.runtime.call_lifecycle import prepare_call, run_call
from branchline.runtime.call_record import (
    CallEvent,
    CallFailure,
    CallObserver,
    CallRecord,
    CallResult,
    new_call_id,
)
from branchline.runtime.headers import CALL_HEADER, MAX_TOKENS_HEADER, RESUME_HEADER
from branchline.runtime.limits import (
    THREAD_BODY_BYTES,
    check_item_counts,
    check_json_values,
    check_prompt_characters,
    run_in_prepare_thread,
)
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.message_cache import parse_json
from branchline.runtime.request_fields import review_fields
from branchline.runtime.router import Router
from branchline.runtime.sampling import find_overridden_in_body
from branchline.runtime.upstream import run_upstream_call

log = logging.getLogger("branchline.gateway")

PROTOCOLS: dict[str, WireProtocol[Any]] = {
    "chat/completions": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
}
COUNT_PROTOCOLS: dict[str, WireProtocol[Any]] = {
    "chat/completions/count_tokens": CHAT,
    "responses/input_tokens": RESPONSES,
    "messages/count_tokens": MESSAGES,
}
"""Endpoints that take the same request and return only the number of its prompt's tokens."""


@dataclass(frozen=True)
class ModelRoute:
    """A path of the model API."""

    endpoint: str
    """The part after `/v1/`."""
    session_id: str | None = None
    agent: str = ""

    @classmethod
    def parse(cls, path: str) -> ModelRoute | None:
        """None if the path is not one of the model API.

        >>> ModelRoute.parse("/sessions/s1/agents/critic/v1/models")
        ModelRoute(endpoint='models', session_id='s1', agent='critic')
        """
        before, found, endpoint = (path + "/" if path.endswith("/v1") else path).partition("/v1/")
        if not found:
            return None
        parts = before.split("/")[1:] if before else []
        names = dict(zip(parts[::2], parts[1::2], strict=False))
        if len(parts) % 2 or list(names) not in ([], ["sessions"], ["agents"], ["sessions", "agents"]):
            return None
        return cls(endpoint.rstrip("/"), names.get("sessions"), unquote(names.get("agents", "")))


@dataclass(frozen=True)
class _ModelCall:
    """One call and the request that it answers."""

    protocol: WireProtocol[Any]
    http: AsgiRequest
    managed: ManagedSession
    parsed: ParsedRequest
    record: CallRecord
    events: AsyncGenerator[CallEvent, None]

    async def respond(self) -> dict[str, Any] | None:
        """Sends the complete answer and returns it."""
        response: dict[str, Any] | None = None
        try:
            async with aclosing(self.events) as events:
                async for event in events:
                    if isinstance(event, CallResult):
                        codec = self.managed.session.codec
                        response = self.protocol.build_response(self.parsed, event, codec)
                        # The call counts as delivered when this returns.
                        await self.http.send_json(response)
        except asyncio.CancelledError:
            _raise_if_closed(self.managed)
            raise
        return response

    async def stream(self, keepalive_s: float) -> dict[str, Any] | None:
        """Sends the answer as it arrives, and returns the whole if the protocol ends a stream with it."""
        encoder = self.protocol.stream_encoder(self.parsed, self.record.call_id, self.managed.session.codec)
        writer = StreamWriter(self.http, encoder, keepalive_s)
        try:
            try:
                async with aclosing(self.events) as events:
                    async for event in events:
                        await writer.write(event)
            except asyncio.CancelledError:
                _raise_if_closed(self.managed)
                raise
        except BranchlineError as error:
            # Before the first event an error is a response with a status; after it, an event.
            code = to_error_info(error).code
            if not self.http.is_streaming and code not in self.protocol.in_stream_errors:
                raise
            info = _error_for_agent(error, self.http)
            self.record.outcome = "failed" if self.http.is_streaming else "refused"
            self.record.status, self.record.failure = info.status, CallFailure.from_error(error)
            await writer.write_error(info)
        finally:
            writer.keepalive_task.cancel()
        return encoder.response if isinstance(encoder, ResponsesStream) else None


class ModelApi:
    """Answers agents."""

    def __init__(
        self, router: Router, access: AccessControl, config: GatewayConfig, observers: Sequence[CallObserver]
    ) -> None:
        self._router = router
        self._access = access
        self._config = config
        self._observers = observers
        self._image_fetcher = ImageFetcher(config.image_urls)
        self._stored_responses = StoredResponses()
        self.in_flight = 0
        """Calls in progress."""

    async def handle(self, route: ModelRoute, http: AsgiRequest) -> None:
        """Answers one request; errors are sent in the envelope of its protocol."""
        protocol, count = PROTOCOLS.get(route.endpoint), COUNT_PROTOCOLS.get(route.endpoint)
        resource, _, name = route.endpoint.partition("/")
        error_body = (protocol or count or PROTOCOLS.get(resource) or CHAT).error_body
        try:
            if http.method == "GET" and http.headers.get("upgrade", "").lower() == "websocket":
                await http.send_json(
                    error_body(WEBSOCKET_ERROR), WEBSOCKET_ERROR.status, WEBSOCKET_ERROR.headers
                )
            elif protocol is not None and http.method == "POST":
                await self._handle_call(protocol, route, http)
            elif count is not None and http.method == "POST":
                await self._count_tokens(count, route, http)
            elif resource == "models" and http.method in ("GET", "HEAD"):
                await self._list_models(route, http)
            elif _is_response(route.endpoint) and http.method in ("GET", "HEAD"):
                await self._read_response(route, http, name)
            elif route.endpoint == "session" and http.method == "GET":
                await self._show_session(route, http)
            else:
                info = _routing_error(route.endpoint, http.method)
                await http.send_json(error_body(info), info.status, info.headers)
        except BranchlineError as error:
            info = _error_for_agent(error, http)
            await http.send_json(error_body(info), info.status, info.headers)
        except ClientDisconnectedError:
            pass
        except Exception:
            log.exception("request failed")
            if not http.is_streaming and not http.is_complete:
                await http.send_json(error_body(ErrorInfo(500, "internal error")), 500)

    async def _list_models(self, route: ModelRoute, http: AsgiRequest) -> None:
        self._access.model_session(route.session_id, bearer_key(http.headers))
        _, _, name = route.endpoint.partition("/")
        # Any name is accepted, so any name exists.
        engines = [engine.partition("@")[0] for engine in self._router.engine_names]  # without the address
        names = [name] if name else [*engines, "branchline"]
        models = (messages if "anthropic-version" in http.headers else chat).model_list(names)
        await http.send_json(models["data"][0] if name else models)

    async def _read_response(self, route: ModelRoute, http: AsgiRequest, response_id: str) -> None:
        """A response of the session, as it was answered or as its record has it."""
        managed = self._access.model_session(route.session_id, bearer_key(http.headers))
        if "true" in parse_qs(http.query).get("stream", ()):
            raise MessageError("stream", True, "false: a stored response is sent as a whole")
        response = self._stored_responses.find(managed, response_id)
        if response is None:
            problem = f"response {response_id!r} is not one of this session"
            info = ErrorInfo(404, problem, "response_id", "not_found")
            await http.send_json(RESPONSES.error_body(info), info.status)
        else:
            await http.send_json(response)

    async def _show_session(self, route: ModelRoute, http: AsgiRequest) -> None:
        """Which session the key opens and which calls it has: a client checks it before it resumes one."""
        managed = self._access.model_session(route.session_id, bearer_key(http.headers))
        call_ids = [call.id for call in managed.session.tree.calls]
        await http.send_json(
            {"id": managed.id, "state": managed.state, "created": managed.created_at, "calls": call_ids}
        )

    async def _count_tokens(self, protocol: WireProtocol[Any], route: ModelRoute, http: AsgiRequest) -> None:
        """Prepares the prompt and answers with its length; nothing is sampled or recorded."""
        assert protocol.count_response is not None
        managed = self._access.model_session(route.session_id, bearer_key(http.headers))
        if self.in_flight >= self._config.max_in_flight:
            raise SessionError("busy", f"{self.in_flight} generations are running, try again in a moment")
        self.in_flight += 1
        try:
            body, parsed = await self._read_in_thread(protocol, managed, route, http)
            with http.cancelled_on_disconnect(managed.call_tasks):
                request = await self._image_fetcher.resolve(parsed.call_request.request, managed.session.tree)
                call_request = replace(parsed.call_request, request=request, body_bytes=len(body))
                turn = await prepare_call(managed, call_request)
                await http.send_json(protocol.count_response(len(turn.prompt_ids)))
        except asyncio.CancelledError:
            _raise_if_closed(managed)
            raise
        finally:
            self.in_flight -= 1

    async def _handle_call(self, protocol: WireProtocol[Any], route: ModelRoute, http: AsgiRequest) -> None:
        managed = self._access.model_session(route.session_id, bearer_key(http.headers))
        record = CallRecord(
            managed.id,
            protocol.name,
            new_call_id(managed, protocol.id_prefix, http.headers.get(CALL_HEADER, "")),
            managed.created_at,
            group=managed.options.group,
            traceparent=http.headers.get("traceparent", ""),
        )
        http.extra_headers.append((protocol.request_id_header, record.call_id.encode()))
        record.response_headers = http.extra_headers
        with self._observed(record):
            managed.require_open()
            size = http.headers.get("content-length", "")
            if size.isdecimal() and int(size[:20]) < THREAD_BODY_BYTES:
                max_bytes = self._config.max_body_bytes
                body = b"".join(await read_body_parts(http.receive, http.headers, max_bytes))
                parsed = self._parse(protocol, managed, route, http.headers, body)
            else:
                body, parsed = await self._read_in_thread(protocol, managed, route, http)
            call_request = record.call_request = parsed.call_request
            record.model, record.agent = parsed.model, call_request.request.agent
            if self.in_flight >= self._config.max_in_flight:
                raise SessionError("busy", f"{self.in_flight} generations are running, try again in a moment")
            engine_route = self._router.route(record.model, record.agent)
            request = replace(
                call_request.request,
                trainable=engine_route.train,
                resume_call_id=http.headers.get(RESUME_HEADER, ""),
            )
            is_forwarded = protocol is CHAT and isinstance(engine_route.engine, UpstreamChat)
            requested: Mapping[str, Any] = call_request.requested
            ignored: Mapping[str, Any] = {}
            is_lenient = self._config.ignore_unknown_fields
            if call_request.other_fields and not is_forwarded:
                recorded, ignored = review_fields(call_request.other_fields, ignore_unknown=is_lenient)
                requested = {**requested, **recorded}
            call_request = replace(
                call_request,
                request=request,
                body_bytes=len(body),
                requested=requested,
                ignored_fields=ignored,
                overridden_fields=find_overridden_in_body(body, managed.options),
                ignores_unsupported=is_lenient,
            )
            if isinstance(engine_route.engine, UpstreamChat):
                if is_forwarded:
                    # Only an upstream of the same protocol knows the fields that are not read here.
                    call_request = chat.for_upstream(body, call_request, managed.options)
                events = run_upstream_call(managed, engine_route.engine, call_request, record)
            else:
                if self._config.image_urls != "none":
                    request = await self._image_fetcher.resolve(request, managed.session.tree)
                    call_request = replace(call_request, request=request)
                limit, flush_s = self._config.max_prompt_tokens, self._config.stream_flush_s
                events = run_call(managed, engine_route.engine, call_request, record, limit, flush_s)
            call = _ModelCall(protocol, http, managed, parsed, record, events)
            self.in_flight += 1
            try:
                with http.cancelled_on_disconnect(managed.call_tasks):
                    if call_request.stream:
                        response = await call.stream(self._config.keepalive_s)
                    else:
                        response = await call.respond()
                if protocol is RESPONSES and response is not None:
                    self._stored_responses.add(managed, response)
            finally:
                self.in_flight -= 1

    async def _read_in_thread(
        self, protocol: WireProtocol[Any], managed: ManagedSession, route: ModelRoute, http: AsgiRequest
    ) -> tuple[bytes, ParsedRequest]:
        """Receives and parses a body that may be large. A session has a few of them at a time; the others are
        not received yet, so that they do not fill the memory."""
        async with managed.large_bodies:
            parts = await read_body_parts(http.receive, http.headers, self._config.max_body_bytes)

            def parse() -> tuple[bytes, ParsedRequest]:
                body = b"".join(parts)
                parts.clear()
                return body, self._parse(protocol, managed, route, http.headers, body)

            return await run_in_prepare_thread(managed, parse, sum(map(len, parts)))

    def _parse(
        self,
        protocol: WireProtocol[Any],
        managed: ManagedSession,
        route: ModelRoute,
        headers: Mapping[str, str],
        data: bytes,
    ) -> ParsedRequest:
        config = self._config
        if len(data) > 2 * config.max_json_values:
            check_json_values(data, config.max_json_values)
        body = parse_json(data, protocol.decode_body)
        fields = body if isinstance(body, dict) else {}
        if len(data) >= THREAD_BODY_BYTES:
            check_item_counts(fields, config.max_messages, config.max_tools)
        user = fields.get("user")
        agent, parent = identify_agent(headers)
        agent = (
            agent
            or route.agent
            or (user if isinstance(user, str) else "")
            or managed.options.agent
            or DEFAULT_AGENT
        )
        retries = headers.get("x-stainless-retry-count", "0")
        limit = headers.get(MAX_TOKENS_HEADER, "")
        if limit and not re.fullmatch("[1-9][0-9]{0,9}", limit):
            raise MessageError(MAX_TOKENS_HEADER, limit, "a whole number of 1 or more")
        context = RequestContext(
            managed,
            str(fields.get("model") or "branchline"),
            agent,
            int(retries[:6]) if retries.isdecimal() and retries.isascii() else 0,
            parent,
            config.default_max_tokens,
            int(limit) if limit else None,
        )
        parsed: ParsedRequest = protocol.read_request(body, context)
        request = parsed.call_request.request
        if len(request.messages) > config.max_messages:
            raise MessageError(
                "messages", f"{len(request.messages)} messages", f"at most {config.max_messages}"
            )
        if len(request.tools) > config.max_tools:
            raise MessageError("tools", f"{len(request.tools)} tools", f"at most {config.max_tools}")
        if len(data) > config.max_prompt_characters:
            check_prompt_characters(parsed.call_request, config.max_prompt_characters)
        return parsed

    @contextmanager
    def _observed(self, record: CallRecord) -> Iterator[None]:
        """Completes the record however the block ends, and passes it to the observers."""
        try:
            yield
        except BranchlineError as error:
            record.status, record.failure = to_error_info(error).status, CallFailure.from_error(error)
            is_failure = (
                isinstance(error, EngineError | JournalError | CompactionError) and record.status >= 500
            )
            record.outcome = "failed" if is_failure else "refused"
            raise
        except (ClientDisconnectedError, asyncio.CancelledError):
            record.outcome, record.status = "cancelled", 499
            raise
        except Exception as error:
            record.outcome, record.status, record.failure = "failed", 500, CallFailure.from_error(error)
            raise
        finally:
            record.total_s = time.perf_counter() - record.started_perf_s
            for observe in self._observers:
                observe(record)


def _is_response(endpoint: str) -> bool:
    """Whether an endpoint is one response, by its id."""
    resource, _, name = endpoint.partition("/")
    return resource == "responses" and name != "" and "/" not in name and endpoint not in COUNT_PROTOCOLS


def _routing_error(endpoint: str, method: str) -> ErrorInfo:
    if endpoint in PROTOCOLS or endpoint in COUNT_PROTOCOLS:
        allowed = "POST"
    elif (explained := explain_endpoint(endpoint, method)) is not None:
        return explained
    elif endpoint.split("/")[0] == "models" or _is_response(endpoint):
        allowed = "GET, HEAD"
    elif endpoint == "session":
        allowed = "GET"
    else:
        known = ", ".join([*PROTOCOLS, "models"])
        problem = f"/v1/{endpoint}: no such path; under a base URL are {known}; GET /openapi.json has all"
        return ErrorInfo(404, problem)
    return ErrorInfo(405, f"{method}: not for this path", headers={"allow": allowed})


def _error_for_agent(error: BranchlineError, http: AsgiRequest) -> ErrorInfo:
    """The error as its agent gets it; the addresses that it does not get are logged. Not the whole error:
    an engine may quote the prompt in it."""
    info = to_agent_error_info(error)
    if info.message != str(error):
        request_id = http.extra_headers[0][1].decode() if http.extra_headers else "without an id"
        addresses = ", ".join(find_addresses(str(error)))
        log.warning("request %s: %s at %s", request_id, type(error).__name__, addresses)
    return info


def _raise_if_closed(managed: ManagedSession) -> None:
    """Raises SessionError if the current task was cancelled by closing its session."""
    task = asyncio.current_task()
    if managed.is_closed and task is not None:
        task.uncancel()
    managed.require_open()
