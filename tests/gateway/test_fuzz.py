"""Any request to any route is answered or refused in the right envelope, without an error or a hang.

Valid requests are mutated field by field, then in several fields at once, then byte by byte. After each of
them the gateway must still answer a valid request and must not have logged an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import HealthCheck, given, settings

from branchline import Message, ToolCall, ToyCodec
from branchline.core.errors import EngineError
from branchline.engines.scripted import ScriptedEngine, ScriptedReply, ScriptedRequest
from branchline.gateway.app import GatewayApp
from branchline.gateway.config import GatewayConfig
from branchline.gateway.model_api import COUNT_PROTOCOLS, PROTOCOLS, ModelRoute
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore
from branchline.tree.journal import Journal
from tests.gateway.harness import Agent, agent, run
from tests.gateway.mutations import (
    BODIES,
    CHAT,
    CONTROL,
    HOSTILE_VALUES,
    control_requests,
    encode_body,
    json_paths,
    model_requests,
    replaced_at,
)
from tests.hang import HANG_S

ADMIN = "ak-admin"
ANSWER_S = HANG_S
BREAK = "break now"
"""A prompt with this text makes the engine fail."""
REPLY = Message("assistant", "so", reasoning_content="hm", tool_calls=(ToolCall("look", '{"at": 1}'),))
CALLS = [endpoint for endpoint in BODIES if endpoint in PROTOCOLS]
"""The other endpoints take the same bodies and only count tokens."""
Header = tuple[bytes, bytes]
fuzzed = settings(
    max_examples=300,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# -- the gateway -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HttpAnswer:
    """A response."""

    status: int
    kind: str
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        data = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(text) for text in data if text != "[DONE]"]


class ErrorLog(logging.Handler):
    """Collects the logged errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._seen.append(self.format(record))

    def drain(self) -> list[str]:
        """The errors since the last call."""
        seen, self._seen = self._seen, []
        return seen


class FuzzTarget:
    """A gateway with a journal, called through ASGI, so that any bytes can be sent."""

    def __init__(self, folder: Path) -> None:
        self.errors = ErrorLog()
        self.journal = Journal(folder / "fuzz.journal")
        self._runner = asyncio.Runner()
        codec = ToyCodec.chatml()
        self.sessions = SessionStore(codec, journal=self.journal)
        self.app = GatewayApp(
            ScriptedEngine(codec, _rule),
            self.sessions,
            GatewayConfig(admin_key=ADMIN, max_body_bytes=1 << 20),
        )
        self._runner.run(self._run_loop())

    async def _run_loop(self) -> None:
        logging.getLogger("branchline").addHandler(self.errors)

    def close(self) -> None:
        logging.getLogger("branchline").removeHandler(self.errors)
        self._runner.close()
        self.journal.close()

    def open(self, **options: Any) -> tuple[str, str, str]:
        """A new session and its two keys."""
        managed, api_key, control_key = self.sessions.open(SessionOptions(**options))
        return managed.id, api_key, control_key

    def send(
        self,
        method: str,
        path: str,
        *,
        key: str = "",
        body: bytes | Sequence[bytes] = b"",
        headers: Sequence[Header] = (),
        query: bytes = b"",
    ) -> HttpAnswer:
        """The response to one request; fails after a timeout."""
        chunks = [body] if isinstance(body, bytes) else list(body)
        length = str(sum(map(len, chunks))).encode()
        auth = [(b"authorization", b"Bearer " + key.encode("latin-1"))] if key else []
        framing = (b"content-length", length) if len(chunks) == 1 else (b"transfer-encoding", b"chunked")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode("ascii"),
            "query_string": query,
            "root_path": "",
            "headers": [*auth, framing, *headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        return self._runner.run(asyncio.wait_for(self._send(scope, chunks), ANSWER_S))

    async def _send(self, scope: Any, chunks: list[bytes]) -> HttpAnswer:
        sent: list[Any] = []
        pending = iter(enumerate(chunks, start=1))

        async def receive() -> Any:
            for number, chunk in pending:
                return {"type": "http.request", "body": chunk, "more_body": number < len(chunks)}
            # The client stays connected.
            return await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        assert sent[0]["type"] == "http.response.start"
        assert not sent[-1].get("more_body", False)
        kind = dict(sent[0]["headers"]).get(b"content-type", b"").decode()
        return HttpAnswer(sent[0]["status"], kind, b"".join(part.get("body", b"") for part in sent[1:]))


def _rule(request: ScriptedRequest) -> ScriptedReply:
    return EngineError("it broke") if BREAK in request.prompt_text else REPLY


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzTarget]:
    target = FuzzTarget(tmp_path_factory.mktemp("fuzz"))
    yield target
    target.close()


def check(
    target: FuzzTarget, answer: HttpAnswer, *, is_messages: bool = False, max_status: int = 499
) -> None:
    """Checks envelope and status, that no error was logged, and that the next request is answered."""
    assert answer.status <= max_status, answer.body
    if answer.status >= 400:
        assert_refusal(answer, is_messages)
    elif answer.kind.startswith("text/event-stream"):
        assert answer.events
    elif answer.kind == "application/json":
        assert answer.json is not None
    assert target.errors.drain() == []
    _, key, _ = target.open()
    good = target.send("POST", "/v1/chat/completions", key=key, body=b'{"messages":[{"role":"user"}]}')
    assert good.status == 200, good.body


def assert_refusal(answer: HttpAnswer, is_messages: bool) -> None:
    assert answer.kind == "application/json"
    envelope = answer.json
    problem = envelope["error"]
    assert isinstance(problem["message"], str)
    assert problem["message"]
    assert isinstance(problem["type"], str)
    if is_messages:
        assert (envelope["type"], sorted(envelope)) == ("error", ["error", "request_id", "type"])
    else:
        assert sorted(envelope) == ["error"]
        assert sorted(problem) == ["code", "message", "param", "type"]


def test_every_route_is_covered() -> None:
    assert set(BODIES) == {*PROTOCOLS, *COUNT_PROTOCOLS}
    app = GatewayApp(ScriptedEngine(), SessionStore(ToyCodec()))
    routes = {
        (method, route.path)  # type: ignore[attr-defined]
        for route in app.control_api.asgi.routes
        for method in route.methods  # type: ignore[attr-defined]
        if method != "HEAD"
    }
    assert routes == {(method, path) for method, path, _ in CONTROL} | {("GET", "/sessions/{id}/wait")}


# -- the model API -----------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", BODIES)
def test_valid_request_is_answered_whole_and_streamed(target: FuzzTarget, endpoint: str) -> None:
    _, key, _ = target.open()
    for stream in (False, True):
        answer = target.send(
            "POST", f"/v1/{endpoint}", key=key, body=encode_body({**BODIES[endpoint], "stream": stream})
        )
        assert answer.status == 200, answer.body
        check(target, answer)


@pytest.mark.parametrize("endpoint", CALLS)
def test_any_value_in_any_field_is_answered(target: FuzzTarget, endpoint: str) -> None:
    session, key, control = target.open()
    for number, (path, value) in enumerate(product(json_paths(BODIES[endpoint]), HOSTILE_VALUES)):
        # The number of values is odd, so each field is tested whole and streamed.
        body = replaced_at({**BODIES[endpoint], "stream": number % 2 == 0}, path, value)
        answer = target.send("POST", f"/v1/{endpoint}", key=key, body=encode_body(body))
        assert answer.status < 500, (path, value, answer.body)
        if answer.status != 200:
            assert_refusal(answer, endpoint.startswith("messages"))
        assert not target.errors.drain(), (path, value)
    for view in ("", "/tree", "/timelines", "/samples", "/report", "/snapshot"):
        check(target, target.send("GET", f"/sessions/{session}{view}", key=control))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", CALLS)
def test_engine_error_differs_from_a_client_error(target: FuzzTarget, endpoint: str, stream: bool) -> None:
    _, key, _ = target.open()
    text = json.dumps({**BODIES[endpoint], "stream": stream})
    body = text.replace("be brief", BREAK).replace("once upon", BREAK).encode()
    answer = target.send("POST", f"/v1/{endpoint}", key=key, body=body)
    assert answer.status == 502
    check(target, answer, is_messages=endpoint == "messages", max_status=502)


@fuzzed
@given(request=model_requests())
def test_no_request_makes_the_model_api_fail(target: FuzzTarget, request: dict[str, Any]) -> None:
    session, key, _ = target.open()
    request["path"] = request["path"].replace("{own}", session)
    route = ModelRoute.parse(unquote(request["path"]))
    is_messages = route is not None and route.endpoint in ("messages", "messages/count_tokens")
    check(target, target.send(**request, key=key), is_messages=is_messages)


# -- the control API ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path", "body"), [row for row in CONTROL if row[2] is not None])
def test_any_value_in_any_field_of_the_control_api_is_answered(
    target: FuzzTarget, method: str, path: str, body: Any
) -> None:
    for field_path, value in product(json_paths(body), HOSTILE_VALUES):
        session, key, _ = target.open()
        sent = encode_body(replaced_at(body, field_path, value))
        answer = target.send(method, path.replace("{id}", session), key=ADMIN, body=sent)
        assert answer.status < 500, (field_path, value, answer.body)
        if answer.status >= 400:
            assert_refusal(answer, False)
        elif path == "/sessions":
            session, key = answer.json["id"], answer.json["api_key"]
        # The session can still be called and read.
        called = target.send("POST", "/v1/chat/completions", key=key, body=encode_body(CHAT))
        shown = target.send("GET", f"/sessions/{session}/samples", key=ADMIN)
        assert called.status < 500, (field_path, value, called.body)
        assert shown.status == 200, (field_path, value, shown.body)
        assert not target.errors.drain(), (field_path, value)


@pytest.mark.parametrize(
    "timeout_s", ["0", "0.001", "-1", "nan", "inf", "1e400", "", "x", "%ff", "%F0%9F%99%82"]
)
def test_any_wait_ends(target: FuzzTarget, timeout_s: str) -> None:
    session, _, control = target.open()
    answer = target.send(
        "GET", f"/sessions/{session}/wait", key=control, query=f"timeout_s={timeout_s}".encode()
    )
    check(target, answer)


@fuzzed
@given(request=control_requests())
def test_no_request_makes_the_control_api_fail(target: FuzzTarget, request: dict[str, Any]) -> None:
    session, api, control = target.open()
    request["path"] = request["path"].replace("{own}", session)
    request["key"] = {"{admin}": ADMIN, "{api}": api, "{control}": control}.get(request["key"], "")
    answer = target.send(**request)
    # The request may have paused the policy.
    target.send("POST", "/policy/resume", key=ADMIN)
    check(target, answer)


def test_journal_of_all_requests_is_replayed(target: FuzzTarget) -> None:
    expected = {managed.id: len(managed.session.tree.calls) for managed in target.sessions}
    replayed = {
        managed.id: len(managed.session.tree.calls)
        for managed in SessionStore(ToyCodec.chatml(), journal=target.journal)
    }
    assert {id: replayed.get(id) for id in expected} == expected


# -- the server --------------------------------------------------------------------------------------

GOOD = b'{"messages":[{"role":"user","content":"p"}]}'
RAW = {
    "chunked": (b"POST", b"transfer-encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)),
    "chunks of no size": (b"POST", b"transfer-encoding: chunked", b"wizard\r\n" + GOOD),
    "chunks that never end": (b"POST", b"transfer-encoding: chunked", b"%x\r\n%b\r\n" % (len(GOOD), GOOD)),
    "less than announced": (b"POST", b"content-length: 100", GOOD),
    "more than announced": (b"POST", b"content-length: 10", GOOD),
    "a negative length": (b"POST", b"content-length: -1", GOOD),
    "two lengths": (b"POST", b"content-length: 3\r\ncontent-length: 44", GOOD),
    "no length": (b"POST", b"x: y", GOOD),
    "expect 100-continue": (b"POST", b"expect: 100-continue\r\ncontent-length: 44", GOOD),
    "websocket upgrade": (
        b"GET",
        b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==",
        b"",
    ),
    "a very long header": (b"POST", b"x: " + b"y" * 200_000, GOOD),
    "a header of any bytes": (b"POST", b"x-branchline-agent: \xff\xfe\x01", GOOD),
    "an unknown method": (b"WIZARD", b"content-length: 0", b""),
}


HALF = ("chunks that never end", "less than announced")
"""Requests after which the client closes its side; otherwise it waits."""


def test_server_survives_invalid_http() -> None:
    async def test() -> None:
        async with agent("here") as a:
            for how, request in RAW.items():
                answer = await asyncio.wait_for(_send_raw(a, *request, close=how in HALF), ANSWER_S)
                if how not in HALF:
                    assert 100 <= int(answer.split(b" ")[1]) < 500, (how, answer)
                assert how != "chunked" or answer.startswith(b"HTTP/1.1 200 OK"), answer
                assert await a.ask_text("p") == "here", how

    run(test)


async def _send_raw(a: Agent, method: bytes, header: bytes, body: bytes, *, close: bool) -> bytes:
    host, _, port = a.gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    key = a.session.api_key.encode()
    writer.write(
        b"%b /v1/chat/completions HTTP/1.1\r\nhost: h\r\nconnection: close\r\n" % method
        + b"authorization: Bearer %b\r\n%b\r\n\r\n%b" % (key, header, body)
    )
    if close:
        writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()
