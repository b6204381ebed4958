"""What all HTTP engines share, tested with VllmEngine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.errors import EngineError, EngineInputError
from branchline.core.token_arrays import as_ids
from branchline.engines.base import BUFFERED_FLUSH_S
from branchline.engines.http import STREAM_INTERVAL, PromptEncoder
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import (
    PROMPT,
    assert_sampled_by,
    collect,
    continuation,
    float32,
    ids_of,
    logprobs_of,
    params,
    round_trip,
    take_tokens,
    versions_of,
)
from tests.engines.fake_servers import FakeVllm
from tests.engines.manual_clock import run_with_frozen_clock, yield_to_loop


def test_closed_generation_is_aborted_at_the_server() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = 2
            engine = VllmEngine(server.url)
            stream = engine.generate(PROMPT, params())
            await take_tokens(stream, 2)
            await stream.aclose()
            await server.aborted.wait()
            await engine.close()

    run_with_frozen_clock(main())


def test_cancelled_consumer_aborts_its_generation() -> None:
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

    run_with_frozen_clock(main())


@pytest.mark.parametrize("ids_per_event", [1, 3])
def test_events_that_arrive_together_are_one_chunk(ids_per_event: int) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after, server.ids_per_event = 6, ids_per_event
            engine = VllmEngine(server.url)
            stream = engine.generate(PROMPT, params(9))
            first = asyncio.create_task(anext(stream))
            await server.is_held.wait()
            ids, logprobs = continuation(PROMPT, 9)
            # The server is in the same thread and sent all six before the client could read.
            assert ids_of([await first]) == ids[:6]
            server.proceed.set()
            rest = await collect(stream)
            assert ids_of(rest) == ids[6:]
            assert logprobs_of(rest) == float32(logprobs[6:])
            await engine.close()

    run_with_frozen_clock(main())


def test_token_that_arrives_alone_is_yielded_alone() -> None:
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

    run_with_frozen_clock(main())


@pytest.mark.parametrize("supports_interval", [False, True])
@pytest.mark.parametrize("write_size", [0, 1, 7, 100])
def test_call_that_is_not_streamed_asks_for_larger_events(supports_interval: bool, write_size: int) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.supports_stream_interval, server.write_size = supports_interval, write_size
            engine = VllmEngine(server.url, version=3)
            chunks = await collect(engine.generate(PROMPT, params(70, flush_s=BUFFERED_FLUSH_S)))
            ids, logprobs = continuation(PROMPT, 70)
            assert (ids_of(chunks), chunks[-1].finish_reason) == (ids, "length")
            assert logprobs_of(chunks) == float32(logprobs)
            (body,) = server.bodies
            assert (body["stream"], body["stream_interval"]) == (True, STREAM_INTERVAL)
            await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize("held", range(5))
def test_tokens_that_arrived_before_a_pause_are_kept(held: int) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = held
            engine = VllmEngine(server.url, version=4)
            task = asyncio.create_task(collect(engine.generate(PROMPT, params(8, flush_s=60))))
            await server.is_held.wait()
            await round_trip(engine)
            await engine.pause()
            server.weights, server.hold_after = 1, None
            await engine.resume(5)
            chunks = await task
            before, _ = continuation(PROMPT, held)
            after, logprobs = continuation([*PROMPT, *before], 8 - held, weights=1)
            assert ids_of(chunks) == before + after
            assert logprobs_of(chunks)[held:] == float32(logprobs)
            assert versions_of(chunks) == [4] * held + [5] * (8 - held)
            assert (chunks[0].num_preempted, chunks[-1].num_preempted) == (0, int(held > 0))
            assert [body["max_tokens"] for body in server.bodies] == [8, 8 - held]
            await engine.close()

    run_with_frozen_clock(main())


CONTROLS = ("/pause?mode=abort&clear_cache=true", "/update_weight_version", "/resume")


@pytest.mark.parametrize("broken", CONTROLS[1:])
def test_failed_resume_leaves_generations_paused_and_can_be_repeated(broken: str) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.json_by_path = dict.fromkeys(CONTROLS, True)
            server.hold_after = 3
            engine = VllmEngine(server.url, version=4)
            stream = engine.generate(PROMPT, params(5))
            chunks = await take_tokens(stream, 3)
            paused = asyncio.create_task(collect(stream))
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
            chunks += await paused
            before, _ = continuation(PROMPT, 3)
            assert ids_of(chunks) == before + continuation([*PROMPT, *before], 2, weights=5)[0]
            assert versions_of(chunks) == [4] * 3 + [5] * 2
            assert versions_of(await late) == [5, 5]
            controls = [path for path in server.request_paths() if path in CONTROLS]
            assert controls[-2:] == list(CONTROLS[1:]), "each control request is sent again"
            await engine.close()

    run_with_frozen_clock(main())


def test_failed_resume_without_a_pause_pauses_running_generations() -> None:
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

    run_with_frozen_clock(main())


def test_close_ends_generations_that_a_failed_resume_left_paused() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.failing_paths = {CONTROLS[1]}
            engine = VllmEngine(server.url)
            await engine.pause()
            paused = asyncio.create_task(collect(engine.generate(PROMPT, params())))
            with pytest.raises(EngineError, match="broken"):
                await engine.resume(5)
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await engine.resume(5)
            for waiting in (paused, collect(engine.generate(PROMPT, params()))):
                with pytest.raises(EngineError, match="closed"):
                    await waiting

    run_with_frozen_clock(main())


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=6),
    updates=st.lists(st.integers(0, 40), max_size=5),
    ids_per_event=st.integers(1, 3),
    write_size=st.sampled_from([0, 1, 50]),
    supports_interval=st.booleans(),
)
def test_every_token_is_sampled_after_the_tokens_before_it_whenever_weights_change(
    calls: list[tuple[bool, int]],
    updates: list[int],
    ids_per_event: int,
    write_size: int,
    supports_interval: bool,
) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.yields_between_events, server.supports_stream_interval = True, supports_interval
            server.ids_per_event, server.write_size = ids_per_event, write_size
            engine = VllmEngine(server.url)
            prompts = [[number + 1] for number in range(len(calls))]
            tasks = [
                asyncio.create_task(
                    collect(engine.generate(as_ids(prompt), params(count, flush_s=60 if coalesce else 0)))
                )
                for prompt, (coalesce, count) in zip(prompts, calls, strict=True)
            ]
            for ticks in updates:
                await yield_to_loop(ticks)
                await engine.pause()
                server.weights += 1
                await engine.resume(server.weights)
            for prompt, (_, count), chunks in zip(prompts, calls, await asyncio.gather(*tasks), strict=True):
                assert_sampled_by(chunks, prompt)
                assert len(ids_of(chunks)) == len(logprobs_of(chunks)) == count
                assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
            await engine.close()

    run_with_frozen_clock(main())


def test_error_after_the_finish_reason_is_ignored() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.event_after = (5, {"error": {"message": "too late"}})
            engine = VllmEngine(server.url)
            chunks = await collect(engine.generate(PROMPT, params(5)))
            assert (ids_of(chunks), chunks[-1].finish_reason) == (continuation(PROMPT, 5)[0], "length")
            await engine.close()

    run_with_frozen_clock(main())


def test_consecutive_calls_share_a_connection() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            engine = VllmEngine(server.url)
            for _ in range(3):
                await collect(engine.generate(PROMPT, params()))
            assert server.connections == 1
            await engine.close()

    run_with_frozen_clock(main())


def test_connection_is_reused_when_its_response_ends_after_the_finish_reason() -> None:
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

    run_with_frozen_clock(main())


@pytest.mark.parametrize(
    ("status", "body", "message"),
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
def test_invalid_request_is_an_input_error_with_the_servers_message(
    status: int, body: Any, message: str
) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.refusal = (status, json.dumps(body).encode())
            engine = VllmEngine(server.url)
            with pytest.raises(EngineInputError, match=message):
                await collect(engine.generate(PROMPT, params()))
            await engine.close()

    run_with_frozen_clock(main())


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

    run_with_frozen_clock(main())


@pytest.mark.parametrize("how", ["dies", "ends", "error", "refuses"])
def test_broken_stream_yields_what_arrived_and_then_an_error(how: str) -> None:
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

    run_with_frozen_clock(main())


def test_unreachable_server_is_an_engine_error() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            pass
        engine = VllmEngine(server.url)
        with pytest.raises(EngineError, match="cannot connect"):
            await collect(engine.generate(PROMPT, params()))
        with pytest.raises(EngineError):
            await engine.ready()
        await engine.close()

    run_with_frozen_clock(main())


def test_close_ends_running_generations() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = 1
            engine = VllmEngine(server.url)
            task = asyncio.create_task(collect(engine.generate(PROMPT, params())))
            await server.is_held.wait()
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await task

    run_with_frozen_clock(main())


ENCODER_STEPS = st.lists(
    st.tuples(st.sampled_from(["", "a", "b"]), st.booleans(), st.lists(st.integers(0, 9), max_size=6)),
    max_size=12,
)


@given(ENCODER_STEPS)
def test_encoded_prompt_is_complete(steps: list[tuple[str, bool, list[int]]]) -> None:
    encoder = PromptEncoder(max_bytes=900)
    last: dict[str, list[int]] = {}
    for session, extends, new in steps:
        prompt = [*last.get(session, []), *new] if extends else new
        last[session] = prompt
        assert encoder.encode(np.array(prompt, np.int32), session) == msgspec.json.encode(prompt)


def test_only_new_ids_are_encoded() -> None:
    encoder = PromptEncoder()
    first = np.arange(1000, dtype=np.int32)
    encoder.encode(first, "s")
    encoder._cache.put("s", (first, b"[cached]"), 100)
    assert encoder.encode(np.append(first, np.int32(7)), "s") == b"[cached,7]"


def test_prompt_cache_is_limited_by_bytes() -> None:
    encoder = PromptEncoder(max_bytes=50_000)
    for number in range(100):
        encoder.encode(np.arange(1000, dtype=np.int32), f"session-{number}")
        assert encoder._cache.bytes <= 50_000
