"""What every engine behind HTTP does, shown on the one for vLLM."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.errors import EngineError, EngineInputError, InputError
from branchline.core.token_arrays import as_ids
from branchline.engines.http import ServerConfig
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import (
    PROMPT,
    collect,
    continuation,
    float32,
    ids_of,
    logprobs_of,
    next_token,
    params,
    round_trip,
    run,
    take_tokens,
    versions_of,
)
from tests.engines.fake_servers import FakeVllm


def test_a_stream_closed_early_is_aborted_at_the_server() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = 2
            engine = VllmEngine(server.url)
            stream = engine.generate(PROMPT, params())
            await take_tokens(stream, 2)
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
            await server.is_held.wait()
            task.cancel()
            await server.aborted.wait()
            with pytest.raises(asyncio.CancelledError):
                await task
            await engine.close()

    run(main())


@pytest.mark.parametrize("per_event", [1, 3])
def test_events_that_arrive_together_are_one_chunk(per_event: int) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after, server.ids_per_event = 6, per_event
            engine = VllmEngine(server.url)
            stream = engine.generate(PROMPT, params(9))
            first = asyncio.create_task(anext(stream))
            await server.is_held.wait()
            ids, logprobs = continuation(PROMPT, 9)
            # All six were sent at once, by a server in the same thread.
            assert ids_of([await first]) == ids[:6]
            server.proceed.set()
            rest = await collect(stream)
            assert ids_of(rest) == ids[6:]
            assert logprobs_of(rest) == float32(logprobs[6:])
            await engine.close()

    run(main())


def test_an_id_that_arrives_alone_leaves_alone() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = 1
            engine = VllmEngine(server.url)
            stream = engine.generate(PROMPT, params(3))
            assert ids_of([await anext(stream)]) == continuation(PROMPT, 1)[0]
            assert server.is_held.is_set()
            server.proceed.set()
            assert ids_of(await collect(stream)) == continuation(PROMPT, 3)[0][1:]
            await engine.close()

    run(main())


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("piece", [0, 1, 7, 100])
def test_an_answer_that_nobody_watches_is_one_chunk(gathers: bool, piece: int) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.supports_stream_interval, server.write_size = gathers, piece
            engine = VllmEngine(server.url, version=3)
            (chunk,) = await collect(engine.generate(PROMPT, params(70, whole=True)))
            ids, logprobs = continuation(PROMPT, 70)
            assert (ids_of([chunk]), chunk.finish_reason, chunk.version) == (ids, "length", 3)
            assert logprobs_of([chunk]) == float32(logprobs)
            (body,) = server.bodies
            assert body["stream"]
            assert body["stream_interval"] > 1
            await engine.close()

    run(main())


@pytest.mark.parametrize("held", range(5))
def test_what_had_arrived_of_an_unwatched_answer_stands_after_a_pause(held: int) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = held
            engine = VllmEngine(server.url, version=4)
            task = asyncio.create_task(collect(engine.generate(PROMPT, params(8, whole=True))))
            await server.is_held.wait()
            await engine.pause()
            server.weights, server.hold_after = 1, None
            await engine.resume(5)
            chunks = await task
            before, _ = continuation(PROMPT, held)
            after, logprobs = continuation([*PROMPT, *before], 8 - held, weights=1)
            assert ids_of(chunks) == before + after
            assert logprobs_of(chunks)[held:] == float32(logprobs)
            assert versions_of(chunks) == [4] * held + [5] * (8 - held)
            assert [body["max_tokens"] for body in server.bodies] == [8, 8 - held]
            assert len(chunks) == (2 if held else 1)
            await engine.close()

    run(main())


@pytest.mark.parametrize("how", ["dies", "ends", "error", "closes"])
def test_what_had_arrived_of_an_unwatched_answer_comes_before_its_error(how: str) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            if how == "dies":
                server.die_after = 2
            elif how == "ends":
                server.end_after = 2
            elif how == "closes":
                server.hold_after = 2
            else:
                server.event_after = (2, {"error": {"message": "engine core died", "code": 500}})
            engine = VllmEngine(server.url)
            stream = engine.generate(PROMPT, params(whole=True))
            first = asyncio.create_task(anext(stream))
            if how == "closes":
                await server.is_held.wait()
                await engine.close()
            assert ids_of([await first]) == continuation(PROMPT, 2)[0]
            with pytest.raises(EngineError):
                await anext(stream)
            await engine.close()

    run(main())


@pytest.mark.parametrize("whole", [False, True])
def test_a_version_that_changes_without_a_pause_is_that_of_what_arrives_from_then_on(whole: bool) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = 3
            engine = VllmEngine(server.url, version=4)
            task = asyncio.create_task(collect(engine.generate(PROMPT, params(5, whole=whole))))
            await server.is_held.wait()
            await round_trip(engine)
            await engine.resume(5)
            server.proceed.set()
            chunks = await task
            assert ids_of(chunks) == continuation(PROMPT, 5)[0]
            assert versions_of(chunks) == [4] * 3 + [5] * 2
            await engine.close()

    run(main())


CONTROLS = ("/pause?mode=abort&clear_cache=true", "/update_weight_version", "/resume")


@pytest.mark.parametrize("broken", CONTROLS[1:])
def test_a_resume_that_fails_holds_everything_under_the_old_version_until_one_succeeds(broken: str) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.json_by_path = dict.fromkeys(CONTROLS, True)
            server.hold_after = 3
            engine = VllmEngine(server.url, version=4)
            stream = engine.generate(PROMPT, params(5))
            chunks = await take_tokens(stream, 3)
            held = asyncio.create_task(collect(stream))
            await engine.pause()
            server.hold_after, server.weights, server.failing_paths = None, 5, {broken}
            for _ in range(2):
                with pytest.raises(EngineError, match="broken"):
                    await engine.resume(5)
            late = asyncio.create_task(collect(engine.generate(PROMPT, params(2))))
            await round_trip(engine)
            assert (engine.version, len(server.bodies)) == (4, 1)
            server.failing_paths = set()
            await engine.resume(5)
            chunks += await held
            before, _ = continuation(PROMPT, 3)
            assert ids_of(chunks) == before + continuation([*PROMPT, *before], 2, weights=5)[0]
            assert versions_of(chunks) == [4] * 3 + [5] * 2
            assert versions_of(await late) == [5, 5]
            controls = [path for path in server.request_paths() if path in CONTROLS]
            assert controls[-2:] == list(CONTROLS[1:]), "the server is told all of it again"
            await engine.close()

    run(main())


def test_a_resume_without_a_pause_that_fails_holds_what_runs() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = 3
            engine = VllmEngine(server.url, version=4)
            running = asyncio.create_task(collect(engine.generate(PROMPT, params(5))))
            await server.is_held.wait()
            await round_trip(engine)
            server.hold_after, server.weights, server.failing_paths = None, 5, {CONTROLS[1]}
            with pytest.raises(EngineError, match="broken"):
                await engine.resume(5)
            await server.aborted.wait()
            server.failing_paths = set()
            await engine.resume(5)
            chunks = await running
            before, _ = continuation(PROMPT, 3)
            assert ids_of(chunks) == before + continuation([*PROMPT, *before], 2, weights=5)[0]
            assert versions_of(chunks) == [4] * 3 + [5] * 2
            await engine.close()

    run(main())


def test_what_a_failed_resume_holds_is_ended_by_closing() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.failing_paths = {CONTROLS[1]}
            engine = VllmEngine(server.url)
            await engine.pause()
            held = asyncio.create_task(collect(engine.generate(PROMPT, params())))
            with pytest.raises(EngineError, match="broken"):
                await engine.resume(5)
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await engine.resume(5)
            for waiting in (held, collect(engine.generate(PROMPT, params()))):
                with pytest.raises(EngineError, match="closed"):
                    await waiting

    run(main())


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=6),
    swaps=st.lists(st.integers(0, 40), max_size=5),
    per_event=st.integers(1, 3),
    piece=st.sampled_from([0, 1, 50]),
    gathers=st.booleans(),
)
def test_whenever_weights_change_every_id_is_sampled_behind_the_ids_before_it(
    calls: list[tuple[bool, int]], swaps: list[int], per_event: int, piece: int, gathers: bool
) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.yields_between_events, server.supports_stream_interval = True, gathers
            server.ids_per_event, server.write_size = per_event, piece
            engine = VllmEngine(server.url)
            prompts = [[number + 1] for number in range(len(calls))]
            tasks = [
                asyncio.create_task(collect(engine.generate(as_ids(prompt), params(count, whole=whole))))
                for prompt, (whole, count) in zip(prompts, calls, strict=True)
            ]
            for ticks in swaps:
                for _ in range(ticks):
                    await asyncio.sleep(0)
                await engine.pause()
                server.weights += 1
                await engine.resume(server.weights)
            for prompt, (_, count), chunks in zip(prompts, calls, await asyncio.gather(*tasks), strict=True):
                ids = list(prompt)
                for one, logprob, version in zip(
                    ids_of(chunks), logprobs_of(chunks), versions_of(chunks), strict=True
                ):
                    expected, its_logprob = next_token(ids, version)
                    assert (one, [logprob]) == (expected, float32([its_logprob]))
                    ids.append(one)
                assert len(ids) == count + 1
                assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
            await engine.close()

    run(main())


def test_a_generation_that_had_finished_is_not_lost_by_what_breaks_behind_it() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.event_after = (5, {"error": {"message": "too late"}})
            engine = VllmEngine(server.url)
            chunks = await collect(engine.generate(PROMPT, params(5)))
            assert (ids_of(chunks), chunks[-1].finish_reason) == (continuation(PROMPT, 5)[0], "length")
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


def test_a_connection_is_shared_even_if_its_answer_ends_after_its_finish() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_end = True
            engine = VllmEngine(server.url)
            task = asyncio.create_task(collect(engine.generate(PROMPT, params())))
            await server.is_held.wait()
            await round_trip(engine)
            server.proceed.set()
            assert ids_of(await task) == continuation(PROMPT, 5)[0]
            before = server.connections
            await collect(engine.generate(PROMPT, params()))
            assert server.connections == before
            assert not server.aborted.is_set()
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
            chunks = await take_tokens(stream, 2)
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
        with pytest.raises(EngineError, match="cannot connect"):
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
            await server.is_held.wait()
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await task

    run(main())


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://[::1"]
)
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(InputError, match="url: got"):
        ServerConfig(url)


def test_a_name_and_a_repr_do_not_tell_secrets() -> None:
    server = ServerConfig("http://user:hidden@host:8000/v1", api_key="secret")
    assert server.host_port == "host:8000"
    assert "secret" not in repr(server)
