"""What every engine behind HTTP does, shown on the one for vLLM."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from branchline.core.errors import EngineError, EngineInputError, InputError
from branchline.engines.http import Server
from branchline.engines.vllm import VllmEngine
from tests.engines.fake import FakeVllm
from tests.engines.model import PROMPT, collect, continuation, ids_of, params, run


def test_a_stream_closed_early_is_aborted_at_the_server() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = 2
            engine = VllmEngine(server.url)
            stream = engine.generate(PROMPT, params())
            assert [await anext(stream), await anext(stream)]
            await stream.aclose()
            await server.aborted.wait()
            await engine.close()

    run(main())


def test_a_cancelled_consumer_aborts_at_the_server() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = 2
            engine = VllmEngine(server.url)
            task = asyncio.create_task(collect(engine.generate(PROMPT, params())))
            await server.held.wait()
            task.cancel()
            await server.aborted.wait()
            with pytest.raises(asyncio.CancelledError):
                await task
            await engine.close()

    run(main())


def test_calls_one_after_another_share_a_connection() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            engine = VllmEngine(server.url)
            for _ in range(3):
                await collect(engine.generate(PROMPT, params()))
            assert server.connections == 1
            await engine.close()

    run(main())


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (
            400,
            {"error": {"message": "too long: 9 > 8", "type": "BadRequestError", "code": 400}},
            "too long: 9 > 8",
        ),
        (422, {"detail": "no such field"}, "no such field"),
        (400, {"object": "error", "message": "old style"}, "old style"),
    ],
)
def test_what_a_server_refuses_is_an_input_error_in_its_words(status: int, body: Any, words: str) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.refusal = (status, json.dumps(body).encode())
            engine = VllmEngine(server.url)
            with pytest.raises(EngineInputError, match=words):
                await collect(engine.generate(PROMPT, params()))
            await engine.close()

    run(main())


@pytest.mark.parametrize("status", [404, 429, 500, 503])
def test_other_statuses_are_engine_errors(status: int) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.refusal = (status, b"<html>oh</html>")
            engine = VllmEngine(server.url)
            with pytest.raises(EngineError, match=f"status {status}: <html>oh</html>") as raised:
                await collect(engine.generate(PROMPT, params()))
            assert not isinstance(raised.value, EngineInputError)
            await engine.close()

    run(main())


@pytest.mark.parametrize("how", ["dies", "ends", "error", "refuses"])
def test_a_stream_that_breaks_mid_way_gives_what_came_and_an_error(how: str) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            if how == "dies":
                server.die_after = 2
            elif how == "ends":
                server.end_after = 2
            else:
                code = 400 if how == "refuses" else 500
                server.event_after = (2, {"error": {"message": "engine core died", "code": code}})
            engine = VllmEngine(server.url)
            stream = engine.generate(PROMPT, params())
            chunks = [await anext(stream), await anext(stream)]
            with pytest.raises(EngineInputError if how == "refuses" else EngineError) as raised:
                await anext(stream)
            assert ids_of(chunks) == continuation(PROMPT, 2)[0]
            assert ("engine core died" in str(raised.value)) == (how in ("error", "refuses"))
            await engine.close()

    run(main())


def test_a_server_that_is_not_there_is_an_engine_error() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            pass
        engine = VllmEngine(server.url)
        with pytest.raises(EngineError, match="ConnectError"):
            await collect(engine.generate(PROMPT, params()))
        with pytest.raises(EngineError):
            await engine.ready()
        await engine.close()

    run(main())


def test_closing_ends_what_runs_and_what_waits() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = 1
            engine = VllmEngine(server.url)
            task = asyncio.create_task(collect(engine.generate(PROMPT, params())))
            await server.held.wait()
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await task

    run(main())


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(InputError, match="url: got"):
        Server(url)


def test_a_name_and_a_repr_do_not_tell_secrets() -> None:
    server = Server("http://user:hidden@host:8000/v1", api_key="secret")
    assert server.place == "host:8000"
    assert "secret" not in repr(server)
