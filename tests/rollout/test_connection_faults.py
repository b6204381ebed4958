"""Which errors of agents are connection faults: those that clients really raise at a server that refuses,
resets, cuts its answers or says nothing, and stand-ins for those of clients that are not installed."""

from __future__ import annotations

import asyncio
import errno
import gc
import http.client
import socket
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import httpx
import pytest

from branchline.client.async_client import AsyncClient
from branchline.core.errors import EngineError, EngineUnavailableError, GatewayError
from branchline.engines.client import HttpClient, ServerConfig
from branchline.rollout.connection_faults import is_connection_fault
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.session_result import EndCause, SessionEnd
from branchline.rollout.sinks import MemorySink
from tests.hang import HANG_S
from tests.rollout.harness import ask_once, run, scripted_gateway

# Some clients close their sockets only with the error that they raise.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
_RESET = b""
"""Stands for a reset in place of an answer."""
ANSWERS: Mapping[str, bytes | None] = {
    "resets": _RESET,
    "garbage": b"\x00\x01 nothing\r\n\r\n",
    "cuts": _HEAD + b"content-length: 100\r\n\r\n{",
    "cuts a chunk": _HEAD + b"transfer-encoding: chunked\r\n\r\n64\r\n{",
    "silent": None,
    "400": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}",
    "500": b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}",
}
FAULTS = ("refuses", "unknown host", "resets", "cuts", "cuts a chunk", "silent")
_SILENCE_S = HANG_S
"""How long clients wait for data; short where none will come."""
AIOHTTP = "aiohttp.client_exceptions"


class BadServer:
    """Answers each connection as told, on a port of its own."""

    def __init__(self, kind: str) -> None:
        self._answer = ANSWERS.get(kind)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        host = "name.invalid" if kind == "unknown host" else "127.0.0.1"
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        if kind in ANSWERS:
            self._thread: threading.Thread | None = threading.Thread(target=self._serve)
            self._thread.start()
        else:
            self._thread = None
            self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(connection)
            if self._answer is None:
                continue
            connection.recv(65536)
            if self._answer == _RESET:
                # Without waiting for what was not sent: a reset instead of an end.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            else:
                connection.sendall(self._answer)
                connection.shutdown(socket.SHUT_WR)
            connection.close()

    def close(self) -> None:
        if self._thread is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread is not None:
            self._thread.join()
        for connection in self._open:
            connection.close()


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[BadServer]:
    if request.param == "silent":
        monkeypatch.setattr(sys.modules[__name__], "_SILENCE_S", 0.3)
    with closing(BadServer(request.param)) as bad:
        yield bad


@pytest.fixture(autouse=True)
def _sockets_of_clients() -> Iterator[None]:
    """Closes what clients left open here, and not in a later test."""
    yield
    gc.collect()


def _with_httpx(url: str) -> None:
    httpx.get(url, timeout=_SILENCE_S).raise_for_status()


def _with_urllib(url: str) -> None:
    urllib.request.urlopen(url, timeout=_SILENCE_S).read()


def _with_http_client(url: str) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_SILENCE_S)
    with closing(connection):
        connection.request("GET", "/")
        response = connection.getresponse()
        response.read()
        _raise_status(response.status)


def _with_requests(url: str) -> None:
    requests = pytest.importorskip("requests")
    requests.get(url, timeout=_SILENCE_S).raise_for_status()


def _with_urllib3(url: str) -> None:
    urllib3 = pytest.importorskip("urllib3")
    with urllib3.PoolManager(timeout=_SILENCE_S, retries=1) as pool:
        _raise_status(pool.request("GET", url).status)


async def _with_aiohttp(url: str) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    timeout = aiohttp.ClientTimeout(sock_read=_SILENCE_S, sock_connect=_SILENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url) as response:
        await response.read()
        response.raise_for_status()


async def _with_openai(url: str) -> None:
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=url, api_key="k", timeout=_SILENCE_S, max_retries=0) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


async def _with_anthropic(url: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="k", timeout=_SILENCE_S, max_retries=0) as one:
        await one.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "hi"}])


async def _with_our_http_client(url: str) -> None:
    config = ServerConfig(url, read_timeout_s=_SILENCE_S, connect_timeout_s=_SILENCE_S)
    client = HttpClient(config, url)
    try:
        response = client.request("GET", "/")
        status, _ = await response.read()
        await response.close()
        _raise_status(status)
    finally:
        await client.close()


async def _with_our_gateway_client(url: str) -> None:
    async with AsyncClient(url, "key", retry_timeout_s=0.0, read_timeout_s=_SILENCE_S) as client:
        await client.policy()


async def _with_task_group(url: str) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(_with_httpx, url))


def _chained(url: str) -> None:
    try:
        _with_httpx(url)
    except httpx.HTTPError as error:
        raise RuntimeError("the model is gone") from error


def _raised_while_handled(url: str) -> None:
    try:
        _with_urllib(url)
    except Exception:
        raise RuntimeError("the model is gone")  # noqa: B904


def _raise_status(status: int) -> None:
    if status >= 400:
        raise ValueError(f"status {status}")


CLIENTS: tuple[Callable[[str], Awaitable[None] | None], ...] = (
    _with_httpx,
    _with_urllib,
    _with_http_client,
    _with_requests,
    _with_urllib3,
    _with_aiohttp,
    _with_openai,
    _with_anthropic,
    _with_our_http_client,
    _with_our_gateway_client,
    _with_task_group,
    _chained,
    _raised_while_handled,
)


def _error_of(client: Callable[[str], Awaitable[None] | None], url: str) -> Exception:
    async def call() -> None:
        value = client(url)
        if value is not None:
            await value

    with pytest.raises(Exception) as caught:
        asyncio.run(call())
    return caught.value


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("server", FAULTS, indirect=True)
def test_the_errors_of_clients_at_bad_servers_are_connection_faults(
    server: BadServer, client: Callable[[str], Awaitable[None] | None]
) -> None:
    if client is _with_openai or client is _with_anthropic:
        pytest.importorskip(client.__name__.removeprefix("_with_"))
    error = _error_of(client, server.url)
    assert is_connection_fault(error), repr(error)
    assert SessionEnd.from_error(error).cause == EndCause.CONNECTION


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("server", ["400", "500"], indirect=True)
def test_an_error_status_is_an_answer_and_no_connection_fault(
    server: BadServer, client: Callable[[str], Awaitable[None] | None]
) -> None:
    error = _error_of(client, server.url)
    assert not is_connection_fault(error), repr(error)
    assert SessionEnd.from_error(error).cause == EndCause.RUNNER_ERROR


def fake(module: str, *names: str, base: type[Exception] = Exception) -> Exception:
    """An error of a class, with its base classes from the last to the first, as a package has them."""
    kind: type[Exception] = base
    for name in reversed(names):
        kind = type(name, (kind,), {"__module__": module})
    return kind("x")


def raised_from(cause: BaseException | None, error: Exception | None = None) -> Exception:
    error = error or ValueError("x")
    error.__cause__ = cause
    return error


def raised_during(context: BaseException, error: Exception | None = None) -> Exception:
    error = error or ValueError("x")
    error.__context__ = context
    return error


def own_timeout() -> Exception:
    async def wait() -> None:
        async with asyncio.timeout(0):
            await asyncio.sleep(1)

    try:
        asyncio.run(wait())
    except TimeoutError as error:
        return error
    raise AssertionError


def retried_in_handler() -> Exception:
    """An HTTP error of a second attempt, which was made where the first was handled."""
    request = httpx.Request("GET", "http://x")
    try:
        try:
            raise httpx.ConnectError("refused")
        except httpx.ConnectError:
            raise httpx.HTTPStatusError("500", request=request, response=httpx.Response(500)) from None
    except httpx.HTTPStatusError as error:
        error.__suppress_context__ = False
        return error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(),
        BrokenPipeError(),
        socket.gaierror(-2, "unknown"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
        TimeoutError("timed out"),
        TimeoutError("_ssl.c:989: The handshake operation timed out"),
        OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] Connect call failed"),
        ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER]"),
        asyncio.IncompleteReadError(b"", 4),
        http.client.RemoteDisconnected("x"),
        http.client.IncompleteRead(b""),
        urllib.error.URLError(ConnectionRefusedError()),
        urllib.error.URLError(TimeoutError("timed out")),
        httpx.ConnectTimeout("x"),
        httpx.ReadTimeout("x"),
        httpx.ReadError("x"),
        httpx.RemoteProtocolError("x"),
        EngineUnavailableError("h: cannot connect"),
        GatewayError("POST /sessions: cannot connect"),
        ExceptionGroup("x", [ExceptionGroup("y", [httpx.ConnectError("z")])]),
        raised_from(raised_during(httpx.ConnectError("x"))),
        raised_from(ExceptionGroup("x", [ConnectionError()])),
        fake("litellm.exceptions", "APIConnectionError", base=type(fake("openai", "APIConnectionError"))),
        fake("openai", "APITimeoutError", "APIConnectionError", "APIError"),
        fake("anthropic._exceptions", "APIConnectionError", "APIError"),
        fake(AIOHTTP, "ClientConnectorError", "ClientOSError", "ClientConnectionError"),
        fake(AIOHTTP, "ServerTimeoutError", "ClientConnectionError", base=TimeoutError),
        fake(AIOHTTP, "ClientPayloadError"),
        fake("requests.exceptions", "ReadTimeout", "Timeout", base=OSError),
        fake("requests.exceptions", "ChunkedEncodingError", base=OSError),
        fake("urllib3.exceptions", "NewConnectionError", "TimeoutError"),
        fake("httpcore", "ConnectError", "NetworkError"),
        fake("websockets.exceptions", "ConnectionClosedError", "ConnectionClosed"),
        fake("anyio", "BrokenResourceError"),
    ],
    ids=repr,
)  # fmt: skip
def test_usual_connection_errors_are_recognised_by_type_chain_and_group(error: Exception) -> None:
    assert is_connection_fault(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ConnectionError"),
        type("ConnectomeError", (Exception,), {})("x"),
        FileNotFoundError(errno.ENOENT, "no file"),
        PermissionError(errno.EACCES, "no access"),
        OSError(errno.ENOSPC, "disk full"),
        TimeoutError(),
        TimeoutError("the tests timed out"),
        own_timeout(),
        EngineError("h: not JSON"),
        GatewayError("GET /policy: status 404: not a gateway's response", 404),
        raised_from(ValueError("not JSON"), GatewayError("GET /policy: not a gateway's response")),
        urllib.error.URLError("unknown url type: foo"),
        httpx.UnsupportedProtocol("no http://"),
        httpx.LocalProtocolError("x"),
        retried_in_handler(),
        raised_from(None, raised_during(ConnectionError())),
        ExceptionGroup("x", [ConnectionError(), ValueError("a bug")]),
        fake("openai", "InternalServerError", "APIStatusError", "APIError"),
        fake("anthropic", "BadRequestError", "APIStatusError", "APIError"),
        fake(AIOHTTP, "ClientResponseError"),
        fake("requests.exceptions", "HTTPError", base=OSError),
        fake("my_package", "APIConnectionError"),
    ],
    ids=repr,
)
def test_other_errors_are_no_connection_faults(error: Exception) -> None:
    assert not is_connection_fault(error)


def test_a_chain_that_ends_nowhere_is_read_once() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_connection_fault(first)


@pytest.mark.parametrize(
    "raised",
    [
        httpx.ReadError("x"),
        TimeoutError("timed out"),
        fake(AIOHTTP, "ServerTimeoutError", "ClientConnectionError", base=TimeoutError),
        ExceptionGroup("x", [httpx.ConnectError("x")]),
        GatewayError("POST /sessions/s/reward: cannot connect"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_session_that_lost_its_connection_is_run_again(raised: Exception) -> None:
    async def test() -> None:
        attempts = 0

        async def agent(task: Mapping[str, Any], session: Any) -> float:
            nonlocal attempts
            attempts += 1
            reward = await ask_once(task, session)
            if attempts == 1:
                raise raised
            return reward

        sink = MemorySink()
        async with scripted_gateway() as gateway:
            rollout = Rollout(gateway, agent, sinks=[sink], config=RolloutConfig(retries={"connection": 1}))
            stats = await rollout.run([{"prompt": "a"}])
        assert (stats.finished, stats.failed) == (1, 1)
        assert [result.end.cause for result in sink.results] == [EndCause.CONNECTION, None]

    run(test)
