"""The model API: which session, which protocol, which engine; then the call, whole or streamed.

/v1/chat/completions                                the key names the session
/sessions/{id}/v1/chat/completions                  the URL does
/sessions/{id}/agents/{agent}/v1/chat/completions   and the agent too
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from branchline.core.call import DEFAULT_AGENT
from branchline.core.errors import BranchlineError, EngineError, JournalError, MessageError, SessionError
from branchline.core.fields import clean
from branchline.engines.openai import UpstreamChat
from branchline.gateway.access import Access
from branchline.gateway.agents import named_by
from branchline.gateway.calls import Done, Event, begin, run_call
from branchline.gateway.capture import run_capture
from branchline.gateway.config import GatewayConfig
from branchline.gateway.exchange import ClientGoneError, Exchange
from branchline.gateway.fleet import Fleet
from branchline.gateway.live import LiveSession
from branchline.gateway.protocols import chat, messages
from branchline.gateway.protocols.base import LIMIT_HEADER, Ask, Caller, Wire
from branchline.gateway.protocols.chat import CHAT, PROMPT_TOKENS
from branchline.gateway.protocols.completions import COMPLETIONS
from branchline.gateway.protocols.messages import COUNT_TOKENS, MESSAGES
from branchline.gateway.protocols.responses import INPUT_TOKENS, RESPONSES
from branchline.gateway.record import CallRecord, Failure, Observer
from branchline.gateway.resume import CALL_HEADER, earlier_attempt, next_attempt
from branchline.gateway.telling import StreamWriter
from branchline.gateway.wire import code_of, error_of

log = logging.getLogger("branchline.gateway")

WIRES: dict[str, Wire[Any]] = {
    "chat/completions": CHAT,
    "chat/completions/count_tokens": PROMPT_TOKENS,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "responses/input_tokens": INPUT_TOKENS,
    "messages": MESSAGES,
    "messages/count_tokens": COUNT_TOKENS,
}
RESUME_HEADER = "x-branchline-resume"


@dataclass(frozen=True)
class Place:
    """What a path of the model API says."""

    verb: str
    """What stands behind `/v1/`."""
    session: str | None = None
    agent: str = ""

    @classmethod
    def find(cls, path: str) -> Place | None:
        """None for a path of another API.

        >>> Place.find("/sessions/s1/agents/critic/v1/models")
        Place(verb='models', session='s1', agent='critic')
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
        self, fleet: Fleet, access: Access, config: GatewayConfig, observers: Sequence[Observer]
    ) -> None:
        self._fleet = fleet
        self._access = access
        self._config = config
        self._observers = observers
        self.in_flight = 0

    async def answer(self, place: Place, exchange: Exchange) -> None:
        """Answers one request, whatever happens, in the envelope of its protocol."""
        wire = WIRES.get(place.verb)
        error = (wire or CHAT).error
        try:
            if wire is not None and exchange.method == "POST":
                answer = self._call if wire.count is None else self._count
                await answer(wire, place, exchange)
            elif wire is None and place.verb.split("/")[0] != "models":
                await exchange.respond(error(404, f"/v1/{place.verb}: no such path", None), 404)
            elif wire is None and exchange.method in ("GET", "HEAD"):
                await self._models(place, exchange)
            else:
                refusal = error(405, f"{exchange.method}: not for this path", None)
                await exchange.respond(refusal, 405, {"allow": "POST" if wire else "GET, HEAD"})
        except BranchlineError as refused:
            status, message, field, headers = error_of(refused)
            await exchange.respond(error(status, message, field, code_of(refused)), status, headers)
        except ClientGoneError:
            pass
        except Exception:
            log.exception("request failed")
            if not exchange.is_streaming:
                await exchange.respond(error(500, "internal error", None), 500)

    async def _models(self, place: Place, exchange: Exchange) -> None:
        self._access.model(place.session, exchange.key)
        _, _, wanted = place.verb.partition("/")
        # Any name is accepted, so any name is there.
        names = [wanted] if wanted else [*self._fleet.names, "branchline"]
        cards = (messages if "anthropic-version" in exchange.headers else chat).cards(names)
        await exchange.respond(cards["data"][0] if wanted else cards)

    async def _count(self, wire: Wire[Any], place: Place, exchange: Exchange) -> None:
        """How long a prompt would be: it is prepared and dropped, so nothing is sampled or recorded."""
        assert wire.count is not None
        live = self._access.model(place.session, exchange.key)
        record = CallRecord(live.id, wire.name, "")
        body = await exchange.json(self._config.max_body_bytes, wire.decode)
        ask = self._read(wire, live, place, exchange, body, record)
        turn = await begin(live, ask.asked, record, None)
        await exchange.respond(wire.count(len(turn.prompt_ids)))

    async def _call(self, wire: Wire[Any], place: Place, exchange: Exchange) -> None:
        live = self._access.model(place.session, exchange.key)
        name = exchange.headers.get(CALL_HEADER, "")
        record = CallRecord(
            live.id,
            wire.name,
            next_attempt(live, name) if name else wire.id_prefix + secrets.token_hex(12),
            live.created,
            group=live.options.group,
            traceparent=exchange.headers.get("traceparent", ""),
        )
        exchange.more_headers.append((wire.request_id, record.call_id.encode()))
        try:
            live.require_open()
            body = await exchange.json(self._config.max_body_bytes, wire.decode)
            ask = self._read(wire, live, place, exchange, body, record)
            if self.in_flight >= self._config.max_in_flight:
                raise SessionError(
                    "busy", f"{self.in_flight} generations are under way, try again in a moment"
                )
            self.in_flight += 1
            try:
                work = self._streamed if ask.stream else self._whole
                await exchange.until_gone(work(wire, live, ask, record, exchange), live.tasks)
            finally:
                self.in_flight -= 1
        except BranchlineError as error:
            failed = isinstance(error, EngineError | JournalError) and error_of(error)[0] >= 500
            record.outcome, record.failure = "failed" if failed else "refused", Failure.of(error)
            record.status = error_of(error)[0]
            raise
        except (ClientGoneError, asyncio.CancelledError):
            record.outcome, record.status = "cancelled", 499
            raise
        except Exception as error:
            record.outcome, record.status, record.failure = "failed", 500, Failure.of(error)
            raise
        finally:
            record.close()
            for observe in self._observers:
                observe(record)

    def _read(
        self,
        wire: Wire[Any],
        live: LiveSession,
        place: Place,
        exchange: Exchange,
        body: object,
        record: CallRecord,
    ) -> Ask:
        headers = exchange.headers
        user = body.get("user") if isinstance(body, dict) else None
        named = named_by(headers)
        agent = clean(
            named.agent
            or place.agent
            or (user if isinstance(user, str) else "")
            or live.options.agent
            or DEFAULT_AGENT
        )
        retry = headers.get("x-stainless-retry-count", "0")
        caller = Caller(
            live,
            agent,
            int(retry[:6]) if retry.isdecimal() and retry.isascii() else 0,
            named.parent,
            self._config.default_max_tokens,
            _limit(headers.get(LIMIT_HEADER, "")),
        )
        ask: Ask = wire.read(body, caller)
        count = len(ask.asked.request.messages)
        if count > self._config.max_messages:
            raise MessageError("messages", f"{count} messages", f"at most {self._config.max_messages}")
        record.model, record.agent = ask.model, agent
        record.streamed, record.asked = ask.stream, ask.asked
        return ask

    async def _events(
        self,
        wire: Wire[Any],
        live: LiveSession,
        ask: Ask,
        record: CallRecord,
        exchange: Exchange,
    ) -> AsyncGenerator[Event, None]:
        """What will happen, once the engine is chosen."""
        resumes = exchange.headers.get(RESUME_HEADER, "")
        route = self._fleet.route(ask.model, record.agent)
        record.engine = route.engine.name
        asked = ask.asked
        if not isinstance(route.engine, UpstreamChat):
            # What an upstream had said is text, and there is no going on behind that.
            resumes = resumes or await earlier_attempt(live, record.call_id)
        if not route.train or resumes:
            asked = replace(asked, request=replace(asked.request, trained=route.train, resumes=resumes))
        if isinstance(route.engine, UpstreamChat):
            if resumes:
                raise SessionError("conflict", f"resume: {route.engine.name} cannot go on behind ids")
            # Only an upstream of the same protocol knows what the fields mean that nobody here reads.
            body = exchange.body if wire is CHAT else b""
            return run_capture(live, route.engine, asked, record, body)
        return run_call(
            live,
            route.engine,
            asked,
            record,
            self._config.max_prompt_tokens,
            self._config.stream_flush_s,
        )

    async def _whole(
        self,
        wire: Wire[Any],
        live: LiveSession,
        ask: Ask,
        record: CallRecord,
        exchange: Exchange,
    ) -> None:
        async with (
            _stopped_with(live),
            aclosing(await self._events(wire, live, ask, record, exchange)) as events,
        ):
            async for event in events:
                if isinstance(event, Done):
                    # The call counts as delivered once this has left, and not before.
                    await exchange.respond(wire.whole(ask, event, live.session.codec))

    async def _streamed(
        self,
        wire: Wire[Any],
        live: LiveSession,
        ask: Ask,
        record: CallRecord,
        exchange: Exchange,
    ) -> None:
        stream = wire.stream(ask, record.call_id, live.session.codec)
        with StreamWriter(exchange, stream, self._config.silence_s) as writer:
            try:
                async with (
                    _stopped_with(live),
                    aclosing(await self._events(wire, live, ask, record, exchange)) as events,
                ):
                    async for event in events:
                        await writer.write(event)
            except BranchlineError as error:
                # Before the first event an error has a status of its own; after it, it is an event.
                code = code_of(error)
                if not exchange.is_streaming and code not in wire.told_inside:
                    raise
                status, message, field, _ = error_of(error)
                record.outcome = "failed" if exchange.is_streaming else "refused"
                record.status, record.failure = status, Failure.of(error)
                await writer.finish(stream.failed(status, message, field, code))


def _limit(given: str) -> int | None:
    if not given:
        return None
    if not re.fullmatch("[1-9][0-9]{0,9}", given):
        raise MessageError(LIMIT_HEADER, given, "a whole number of 1 or more")
    return int(given)


@asynccontextmanager
async def _stopped_with(live: LiveSession) -> AsyncIterator[None]:
    """Around a call: one that is stopped because its session was closed is told so."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if live.is_closed and task is not None:
            task.uncancel()
        live.require_open()
        raise
