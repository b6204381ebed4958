"""The model API: which session, which protocol, which engine; then the call, whole or streamed.

/v1/chat/completions                                the key names the session
/sessions/{id}/v1/chat/completions                  the URL does
/sessions/{id}/agents/{agent}/v1/chat/completions   and the agent too
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from branchline.core.call import DEFAULT_AGENT
from branchline.core.errors import BranchlineError, EngineError, JournalError, MessageError, SessionError
from branchline.core.reader import replace_surrogates
from branchline.gateway.access import AccessControl
from branchline.gateway.agent_headers import identify_agent
from branchline.gateway.asgi_request import AsgiRequest, ClientDisconnectedError
from branchline.gateway.config import GatewayConfig
from branchline.gateway.http_errors import error_code, http_error
from branchline.gateway.protocols import chat, messages
from branchline.gateway.protocols.base import ParsedRequest, RequestContext, WireProtocol
from branchline.gateway.protocols.chat import CHAT, CHAT_COUNT_TOKENS
from branchline.gateway.protocols.completions import COMPLETIONS
from branchline.gateway.protocols.messages import MESSAGES, MESSAGES_COUNT_TOKENS
from branchline.gateway.protocols.responses import RESPONSES, RESPONSES_COUNT_TOKENS
from branchline.gateway.stream_writer import StreamWriter
from branchline.runtime.call_lifecycle import prepare_call
from branchline.runtime.call_record import CallEvent, CallFailure, CallObserver, CallRecord, CallResult
from branchline.runtime.headers import CALL_HEADER, MAX_TOKENS_HEADER, RESUME_HEADER
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.resume import new_call_id
from branchline.runtime.router import Router

log = logging.getLogger("branchline.gateway")

PROTOCOLS: dict[str, WireProtocol[Any]] = {
    "chat/completions": CHAT,
    "chat/completions/count_tokens": CHAT_COUNT_TOKENS,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "responses/input_tokens": RESPONSES_COUNT_TOKENS,
    "messages": MESSAGES,
    "messages/count_tokens": MESSAGES_COUNT_TOKENS,
}


@dataclass(frozen=True)
class ModelRoute:
    """What a path of the model API says."""

    endpoint: str
    """What stands behind `/v1/`."""
    session_id: str | None = None
    agent: str = ""

    @classmethod
    def parse(cls, path: str) -> ModelRoute | None:
        """None for a path of another API.

        >>> ModelRoute.parse("/sessions/s1/agents/critic/v1/models")
        ModelRoute(endpoint='models', session_id='s1', agent='critic')
        """
        before, found, verb = path.partition("/v1/")
        if not found:
            return None
        parts = before.split("/")[1:] if before else []
        names = dict(zip(parts[::2], parts[1::2], strict=False))
        if len(parts) % 2 or list(names) not in ([], ["sessions"], ["agents"], ["sessions", "agents"]):
            return None
        return cls(verb.rstrip("/"), names.get("sessions"), unquote(names.get("agents", "")))


class ModelApi:
    """Answers agents."""

    def __init__(
        self, fleet: Router, access: AccessControl, config: GatewayConfig, observers: Sequence[CallObserver]
    ) -> None:
        self._router = fleet
        self._access = access
        self._config = config
        self._observers = observers
        self.in_flight = 0

    async def handle(self, place: ModelRoute, exchange: AsgiRequest) -> None:
        """Answers one request, whatever happens, in the envelope of its protocol."""
        wire = PROTOCOLS.get(place.endpoint)
        error = (wire or CHAT).error_body
        try:
            if wire is not None and exchange.method == "POST":
                answer = self._handle_call if wire.count_response is None else self._count_tokens
                await answer(wire, place, exchange)
            elif wire is None and place.endpoint.split("/")[0] != "models":
                await exchange.send_json(error(404, f"/v1/{place.endpoint}: no such path", None), 404)
            elif wire is None and exchange.method in ("GET", "HEAD"):
                await self._list_models(place, exchange)
            else:
                refusal = error(405, f"{exchange.method}: not for this path", None)
                await exchange.send_json(refusal, 405, {"allow": "POST" if wire else "GET, HEAD"})
        except BranchlineError as refused:
            status, message, field, headers = http_error(refused)
            await exchange.send_json(error(status, message, field, error_code(refused)), status, headers)
        except ClientDisconnectedError:
            pass
        except Exception:
            log.exception("request failed")
            if not exchange.is_streaming:
                await exchange.send_json(error(500, "internal error", None), 500)

    async def _list_models(self, place: ModelRoute, exchange: AsgiRequest) -> None:
        self._access.model_session(place.session_id, exchange.api_key)
        _, _, wanted = place.endpoint.partition("/")
        # Any name is accepted, so any name is there.
        names = [wanted] if wanted else [*self._router.engine_names, "branchline"]
        cards = (messages if "anthropic-version" in exchange.headers else chat).model_list(names)
        await exchange.send_json(cards["data"][0] if wanted else cards)

    async def _count_tokens(self, wire: WireProtocol[Any], place: ModelRoute, exchange: AsgiRequest) -> None:
        """How long a prompt would be: it is prepared and dropped, so nothing is sampled or recorded."""
        assert wire.count_response is not None
        live = self._access.model_session(place.session_id, exchange.api_key)
        record = CallRecord(live.id, wire.name, "")
        body = await exchange.read_json(self._config.max_body_bytes, wire.decode_body)
        ask = self._read_request(wire, live, place, exchange, body, record)
        turn = await prepare_call(live, ask.call_request)
        await exchange.send_json(wire.count_response(len(turn.prompt_ids)))

    async def _handle_call(self, wire: WireProtocol[Any], place: ModelRoute, exchange: AsgiRequest) -> None:
        live = self._access.model_session(place.session_id, exchange.api_key)
        record = CallRecord(
            live.id,
            wire.name,
            new_call_id(live, wire.id_prefix, exchange.headers.get(CALL_HEADER, "")),
            live.created_at,
            group=live.options.group,
            traceparent=exchange.headers.get("traceparent", ""),
        )
        exchange.extra_headers.append((wire.request_id_header, record.call_id.encode()))
        try:
            live.require_open()
            body = await exchange.read_json(self._config.max_body_bytes, wire.decode_body)
            ask = self._read_request(wire, live, place, exchange, body, record)
            if self.in_flight >= self._config.max_in_flight:
                raise SessionError(
                    "busy", f"{self.in_flight} generations are under way, try again in a moment"
                )
            self.in_flight += 1
            try:
                work = self._stream if ask.stream else self._respond
                await exchange.run_until_disconnect(work(wire, live, ask, record, exchange), live.call_tasks)
            finally:
                self.in_flight -= 1
        except BranchlineError as error:
            failed = isinstance(error, EngineError | JournalError) and http_error(error)[0] >= 500
            record.outcome, record.failure = "failed" if failed else "refused", CallFailure.from_error(error)
            record.status = http_error(error)[0]
            raise
        except (ClientDisconnectedError, asyncio.CancelledError):
            record.outcome, record.status = "cancelled", 499
            raise
        except Exception as error:
            record.outcome, record.status, record.failure = "failed", 500, CallFailure.from_error(error)
            raise
        finally:
            record.close()
            for observe in self._observers:
                observe(record)

    def _read_request(
        self,
        wire: WireProtocol[Any],
        live: ManagedSession,
        place: ModelRoute,
        exchange: AsgiRequest,
        body: object,
        record: CallRecord,
    ) -> ParsedRequest:
        headers = exchange.headers
        user = body.get("user") if isinstance(body, dict) else None
        named = identify_agent(headers)
        agent = replace_surrogates(
            named.agent
            or place.agent
            or (user if isinstance(user, str) else "")
            or live.options.agent
            or DEFAULT_AGENT
        )
        retry = headers.get("x-stainless-retry-count", "0")
        caller = RequestContext(
            live,
            agent,
            int(retry[:6]) if retry.isdecimal() and retry.isascii() else 0,
            named.parent,
            self._config.default_max_tokens,
            _read_max_tokens_header(headers.get(MAX_TOKENS_HEADER, "")),
        )
        ask: ParsedRequest = wire.read_request(body, caller)
        count = len(ask.call_request.request.messages)
        if count > self._config.max_messages:
            raise MessageError("messages", f"{count} messages", f"at most {self._config.max_messages}")
        record.model, record.agent = ask.model, agent
        record.call_request = ask.call_request
        return ask

    def _start_call(
        self,
        wire: WireProtocol[Any],
        live: ManagedSession,
        ask: ParsedRequest,
        record: CallRecord,
        exchange: AsgiRequest,
    ) -> AsyncGenerator[CallEvent, None]:
        """What will happen, once the engine is chosen."""
        route = self._router.route(ask.model, record.agent)
        request = replace(
            ask.call_request.request,
            trainable=route.train,
            resume_call_id=exchange.headers.get(RESUME_HEADER, ""),
        )
        call_request = replace(ask.call_request, request=request)
        if route.is_upstream and wire is CHAT:
            # Only an upstream of the same protocol knows the fields that are not read here.
            options = chat.upstream_options(exchange.body, live.options, request.tools)
            call_request = replace(call_request, upstream_options=options)
        return route.run_call(
            live, call_request, record, self._config.max_prompt_tokens, self._config.stream_flush_s
        )

    async def _respond(
        self,
        wire: WireProtocol[Any],
        live: ManagedSession,
        ask: ParsedRequest,
        record: CallRecord,
        exchange: AsgiRequest,
    ) -> None:
        async with (
            _closed_session_errors(live),
            aclosing(self._start_call(wire, live, ask, record, exchange)) as events,
        ):
            async for event in events:
                if isinstance(event, CallResult):
                    # The call counts as delivered once this has left, and not before.
                    await exchange.send_json(wire.build_response(ask, event, live.session.codec))

    async def _stream(
        self,
        wire: WireProtocol[Any],
        live: ManagedSession,
        ask: ParsedRequest,
        record: CallRecord,
        exchange: AsgiRequest,
    ) -> None:
        stream = wire.stream_encoder(ask, record.call_id, live.session.codec)
        with StreamWriter(exchange, stream, self._config.keepalive_s) as writer:
            try:
                async with (
                    _closed_session_errors(live),
                    aclosing(self._start_call(wire, live, ask, record, exchange)) as events,
                ):
                    async for event in events:
                        await writer.write(event)
            except BranchlineError as error:
                # Before the first event an error has a status of its own; after it, it is an event.
                code = error_code(error)
                if not exchange.is_streaming and code not in wire.in_stream_errors:
                    raise
                status, message, field, _ = http_error(error)
                record.outcome = "failed" if exchange.is_streaming else "refused"
                record.status, record.failure = status, CallFailure.from_error(error)
                await writer.finish(stream.encode_error(status, message, field, code))


def _read_max_tokens_header(given: str) -> int | None:
    if not given:
        return None
    if not re.fullmatch("[1-9][0-9]{0,9}", given):
        raise MessageError(MAX_TOKENS_HEADER, given, "a whole number of 1 or more")
    return int(given)


@asynccontextmanager
async def _closed_session_errors(live: ManagedSession) -> AsyncIterator[None]:
    """Around a call: one that is stopped because its session was closed is told so."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if live.is_closed and task is not None:
            task.uncancel()
        live.require_open()
        raise
