"""One session cannot delay others: large requests are refused early, or prepared in a few threads of it."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from branchline import ToyCodec
from branchline.core.errors import BranchlineError
from branchline.gateway import model_api
from branchline.gateway.asgi import read_body_parts
from branchline.gateway.config import GatewayConfig
from branchline.gateway.protocols import chat, messages, responses
from branchline.runtime.limits import run_in_prepare_thread
from branchline.tree.session import Session
from tests.gateway.harness import Agent, agent, run
from tests.hang import HANG_S

PADDING = "x" * 100_000
"""Makes a body large enough for a thread."""


async def _post(a: Agent, endpoint: str, body: Any, key: str | None = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {key or a.session.api_key}"}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await a.http.post(f"{a.gateway.url}/v1/{endpoint}", content=content, headers=headers)


def _tool(index: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{index}", "description": "x" * 60}}


@pytest.mark.parametrize(
    ("endpoint", "body", "problem"),
    [
        ("chat/completions", {"messages": [], "tools": [_tool(i) for i in range(1001)]}, "tools: got '1001"),
        ("responses", {"input": "x" * 99_000, "tools": [_tool(i) for i in range(1001)]}, "tools: got '1001"),
        ("messages", {"messages": [], "tools": [{"name": "x" * 100}] * 1001}, "tools: got '1001"),
        ("chat/completions", {"messages": [{}] * 30_000}, "messages: got '30000 items'"),
        ("responses", {"input": [{}] * 30_000}, "input: got '30000 items'"),
        ("messages", {"messages": [{}] * 30_000}, "messages: got '30000 items'"),
        (
            "chat/completions",
            {"messages": [], "functions": [{"name": "x" * 100}] * 1001},
            "functions: got '1001",
        ),
    ],
)
def test_items_are_counted_before_any_of_them_is_read(
    endpoint: str, body: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> Any:
        raise AssertionError("the request was read")

    for module in (chat, messages, responses):
        assert module.read_request is not read
    for protocol in (chat.CHAT, messages.MESSAGES, responses.RESPONSES):
        # The protocols are frozen values.
        monkeypatch.setitem(protocol.__dict__, "read_request", read)

    async def test() -> None:
        async with agent("x") as a:
            for path in (endpoint, f"{endpoint}/count_tokens".replace("responses/count_tokens", endpoint)):
                refused = await _post(a, path, body)
                assert refused.status_code == 400
                assert problem in refused.json()["error"]["message"]

    run(test)


def test_a_body_with_too_many_values_is_refused_undecoded() -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await _post(a, "chat/completions", b'{"messages":[' + b"[]," * 400_000)
            assert "commas and opening brackets', expected at most 250000" in refused.text

    run(test)


def _living_errors() -> list[Any]:
    return [one for one in gc.get_objects() if issubclass(type(one), BranchlineError)]


def test_a_refused_body_is_freed_without_a_garbage_collection() -> None:
    """Collections are rare in a gateway; bodies in reference cycles would fill its memory."""

    async def test() -> None:
        async with agent("x") as a:
            gc.collect()
            gc.disable()
            before = _living_errors()  # Other tests may hold some.
            try:
                for endpoint in ("chat/completions", "messages/count_tokens"):
                    assert (await _post(a, endpoint, b"[" * 2_000_000)).status_code == 400
                # The thread that raised an error may hold it for a moment.
                async with asyncio.timeout(HANG_S):
                    while any(all(one is not old for old in before) for one in _living_errors()):
                        await asyncio.sleep(0.01)
            finally:
                gc.enable()

    run(test)


def test_images_do_not_count_as_text() -> None:
    async def test() -> None:
        config = GatewayConfig(max_prompt_characters=1000)
        async with agent("x", config=config) as a:
            url = "data:image/png;base64," + "A" * 4000
            parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": url}}]
            answer = await a.ask({"role": "user", "content": parts})
            assert "characters" not in answer.text
            refused = await a.ask("x" * 1001)
            assert "got '1001 characters', expected at most 1000" in refused.json()["error"]["message"]

    run(test)


# -- threads -----------------------------------------------------------------------------------------


class SlowPrepare:
    """Holds every large prompt that is prepared, and notes its session."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_continue = threading.Event()
        self.started: list[str] = []
        self.threads: set[str] = set()
        prepare = Session.prepare

        def slow(session: Session, request: Any) -> Any:
            if sum(len(message.content) for message in request.messages) < 1000:
                return prepare(session, request)
            self.threads.add(threading.current_thread().name)
            self.started.append(session.id)
            self.may_continue.wait(HANG_S)
            return prepare(session, request)

        monkeypatch.setattr(Session, "prepare", slow)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "endpoint", ["chat/completions", "chat/completions/count_tokens", "messages/count_tokens"]
)
def test_a_large_request_waits_for_one_of_another_session_at_most(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowPrepare(monkeypatch)

    async def test() -> None:
        async with agent(rule=lambda _: "ok") as a:
            other = await a.gateway.session(id="other")
            body = {"messages": [{"role": "user", "content": PADDING}], "max_tokens": 3}
            attack = [asyncio.create_task(_post(a, endpoint, body)) for _ in range(8)]
            await _until(lambda: a.session.id in slow.started)
            small = {"messages": [{"role": "user", "content": "hi"}]}
            assert (await _post(a, "chat/completions", small, other.api_key)).status_code == 200
            large = asyncio.create_task(_post(a, "chat/completions", body, other.api_key))
            await _until(other.managed.prepare_lock.locked)
            assert (await a.get(""))["id"] == a.session.id
            slow.may_continue.set()
            statuses = [answer.status_code for answer in await asyncio.gather(large, *attack)]
            assert statuses == [200] * 9
            assert slow.started[:2] == [a.session.id, "other"], "it waited for more than one of the eight"

    try:
        run(test)
    finally:
        slow.may_continue.set()
    assert all(name.startswith("branchline-prepare") for name in slow.threads)


def test_a_session_receives_two_large_bodies_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bodies of its other requests are not read meanwhile, so that they do not fill the memory."""
    may_continue = asyncio.Event()
    receiving = most = 0

    async def slow(*args: Any) -> list[bytes]:
        nonlocal receiving, most
        receiving += 1
        most = max(most, receiving)
        await may_continue.wait()
        parts = await read_body_parts(*args)
        receiving -= 1
        return parts

    async def test() -> None:
        async with agent(rule=lambda _: "ok") as a:
            other = await a.gateway.session(id="other")
            body = {"messages": [{"role": "user", "content": PADDING}], "max_tokens": 3}
            calls = [asyncio.create_task(_post(a, "chat/completions", body)) for _ in range(6)]
            await _until(lambda: receiving >= 2)
            calls.append(asyncio.create_task(_post(a, "chat/completions", body, other.api_key)))
            await _until(lambda: receiving >= 3)  # another session is not limited by this one
            await asyncio.sleep(0.1)
            may_continue.set()
            assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 7

    monkeypatch.setattr(model_api, "read_body_parts", slow)
    run(test)
    assert most == 3


def test_only_new_text_makes_a_thread_necessary() -> None:
    """An agent sends its whole history with every call; most of it is in the tree."""
    threads: list[bool] = []

    class Codec(ToyCodec):
        def extend(self, *args: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name.startswith("branchline-prepare"))
            return super().extend(*args, **options)

    async def test() -> None:
        async with agent(rule=lambda _: "ok", codec=Codec()) as a:
            history = [{"role": "user", "content": "x" * 5_000}]
            for text in ("short", "x" * 31_000, "short"):
                answer = await _post(a, "chat/completions", {"messages": history})
                history += [answer.json()["choices"][0]["message"], {"role": "user", "content": text}]
            await _post(a, "chat/completions", {"messages": history})

    run(test)
    assert threads == [False, False, True, False]


def test_a_session_of_many_large_tools_does_not_block_the_event_loop() -> None:
    """Tools count too: they are rendered into the prompt."""
    threads: list[str] = []

    class Codec(ToyCodec):
        def extend(self, *args: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return super().extend(*args, **options)

    async def test() -> None:
        async with agent(rule=lambda _: "ok", codec=Codec()) as a:
            await a.ask_text("hi", tools=[_tool(index) for index in range(500)])
            await a.ask_text("hi")

    run(test)
    assert threads[0].startswith("branchline-prepare")
    assert not threads[-1].startswith("branchline-prepare")


def test_a_cancelled_caller_keeps_its_thread_until_the_work_is_done() -> None:
    async def test() -> None:
        async with agent("x") as a:
            managed, may_continue = a.session.managed, threading.Event()
            callers = [
                asyncio.create_task(run_in_prepare_thread(managed, lambda: may_continue.wait(HANG_S), 0))
                for _ in range(2)
            ]
            await _until(managed.prepare_lock.locked)
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
            assert managed.prepare_lock.locked()
            started = time.monotonic()
            may_continue.set()
            assert await run_in_prepare_thread(managed, lambda: "next", 0) == "next"
            assert time.monotonic() - started < HANG_S / 2

    run(test)


def test_a_request_does_not_wait_for_a_much_longer_one_of_another_session() -> None:
    async def test() -> None:
        async with agent("x") as a, agent("x") as b:
            may_continue = threading.Event()
            wait = partial(run_in_prepare_thread, a.session.managed, lambda: may_continue.wait(HANG_S))
            long = asyncio.create_task(wait(250_000))
            await _until(a.session.managed.prepare_lock.locked)
            assert await run_in_prepare_thread(b.session.managed, lambda: "short", 249_999) == "short"
            assert not long.done()
            may_continue.set()
            assert await long

    run(test)


def test_counting_tokens_counts_as_a_call_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowPrepare(monkeypatch)

    async def test() -> None:
        async with agent("x", config=GatewayConfig(max_in_flight=1)) as a:
            body = {"messages": [{"role": "user", "content": PADDING}]}
            first = asyncio.create_task(_post(a, "messages/count_tokens", body))
            await _until(lambda: bool(slow.started))
            refused = await _post(a, "messages/count_tokens", body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            slow.may_continue.set()
            assert (await first).status_code == 200
            assert (await _post(a, "messages/count_tokens", body)).status_code == 200

    try:
        run(test)
    finally:
        slow.may_continue.set()


def test_views_of_sessions_have_a_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that keep the thread of the control API busy delay no prompt."""
    may_continue = threading.Event()
    snapshot, readers = Session.snapshot, []

    def slow(session: Session) -> Any:
        readers.append(threading.current_thread().name)
        may_continue.wait(HANG_S)
        return snapshot(session)

    async def test() -> None:
        async with agent(rule=lambda _: "ok") as a:
            await a.ask_text("hi")
            reading = [asyncio.create_task(a.get("/samples")) for _ in range(8)]
            await _until(lambda: len(readers) == 1)
            await a.ask_text(PADDING)
            may_continue.set()
            await asyncio.gather(*reading)

    monkeypatch.setattr(Session, "snapshot", slow)
    try:
        run(test)
    finally:
        may_continue.set()
    assert all(name.startswith("branchline-control") for name in readers)
