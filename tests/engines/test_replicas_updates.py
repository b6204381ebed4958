"""Weight updates of replicas: a replica that misses a part of an update gets no calls until the next."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.errors import EngineError
from branchline.core.token_arrays import as_ids
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import (
    PROMPT,
    assert_sampled_by,
    collect,
    continuation,
    ids_of,
    params,
    take_tokens,
    versions_of,
)
from tests.engines.fake_servers import FakeVllm
from tests.engines.manual_clock import run_with_frozen_clock, yield_to_loop
from tests.engines.replica_servers import replica_servers, request_counts, wait_for_requests

PAUSE = "/pause?mode=abort&clear_cache=true"
RESUME = "/update_weight_version"


def test_pause_and_resume_reach_all_replicas() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers), FakeVllm() as further:
            for server in servers:
                server.hold_after = 2
            streams = [replicas.generate(PROMPT, params(5), session=session) for session in "ab"]
            outputs = [await take_tokens(stream, 2) for stream in streams]
            rests = [asyncio.create_task(collect(stream)) for stream in streams]
            await replicas.pause()
            await replicas.add(VllmEngine(further.url))
            for server in (*servers, further):
                server.hold_after, server.weights = None, 1
            late = asyncio.create_task(collect(replicas.generate(PROMPT, params(5))))
            await replicas.resume(7)
            before, _ = continuation(PROMPT, 2)
            for output, rest in zip(outputs, rests, strict=True):
                output += await rest
                assert ids_of(output) == before + continuation([*PROMPT, *before], 3, weights=1)[0]
                assert versions_of(output) == [0, 0, 7, 7, 7]
            assert versions_of(await late) == [7] * 5
            assert request_counts([further]) == [1]
            assert replicas.version == 7

    run_with_frozen_clock(main())


def test_replica_that_missed_a_weight_update_is_not_used_until_the_next() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].failing_paths = {"/pause?mode=abort&clear_cache=true"}
            await replicas.pause()
            await replicas.resume(1)
            assert replicas.unavailable == ("0",)
            await collect(replicas.generate(PROMPT, params(1), session="a"))
            assert request_counts(servers) == [0, 1]
            servers[0].failing_paths = set()
            await replicas.pause()
            await replicas.resume(2)
            assert replicas.unavailable == ()
            await collect(replicas.generate(PROMPT, params(1), session="b"))
            assert request_counts(servers) == [1, 1]
            servers[0].failing_paths = servers[1].failing_paths = {"/update_weight_version"}
            with pytest.raises(EngineError, match="resume failed on all replicas"):
                await replicas.resume(3)

    run_with_frozen_clock(main())


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("missed", [PAUSE, RESUME])
def test_calls_of_a_replica_that_missed_a_weight_update_move(missed: str, is_read: bool) -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].hold_after, servers[0].failing_paths = 3, {missed}
            stream = replicas.generate(PROMPT, params(6), session="a")
            chunks = await take_tokens(stream, 3)
            rest = asyncio.create_task(collect(stream)) if is_read else None
            await replicas.pause()
            servers[0].hold_after = None
            servers[1].weights = 7
            await replicas.resume(7)
            chunks += await (rest or collect(stream))
            assert versions_of(chunks) == [0] * 3 + [7] * 3
            assert_sampled_by(chunks)
            assert request_counts(servers) == [1, 1]
            assert (replicas.stale, replicas.unavailable) == (("0",), ("0",))
            assert [engine.version for engine in replicas.engines] == [0, 7]
            assert replicas.version == 7

    run_with_frozen_clock(main())


def test_replica_that_missed_only_the_resume_returns_with_the_next_one() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            await replicas.pause()
            servers[0].failing_paths = {RESUME}
            await replicas.resume(1)
            assert replicas.stale == ("0",)
            servers[0].failing_paths = set()
            await replicas.resume(1)
            assert replicas.stale == ()
            assert [engine.version for engine in replicas.engines] == [1, 1]

    run_with_frozen_clock(main())


def test_replica_that_missed_the_pause_does_not_return_with_a_resume_alone() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].failing_paths = {PAUSE}
            await replicas.pause()
            servers[0].failing_paths = set()
            for _ in range(2):
                await replicas.resume(1)
                assert replicas.stale == ("0",)
            await replicas.pause()
            await replicas.resume()
            assert replicas.stale == ("0",), "without a new version it has no new weights"
            await replicas.pause()
            await replicas.resume(2)
            assert replicas.stale == ()

    run_with_frozen_clock(main())


def test_resume_that_fails_on_all_replicas_can_be_repeated() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            for server in servers:
                server.hold_after = 2
            streams = [replicas.generate(PROMPT, params(5), session=session) for session in "ab"]
            outputs = [await take_tokens(stream, 2) for stream in streams]
            rests = [asyncio.create_task(collect(stream)) for stream in streams]
            await replicas.pause()
            for server in servers:
                server.hold_after, server.weights, server.failing_paths = None, 3, {RESUME}
            with pytest.raises(EngineError, match=r"resume failed on all replicas: .*broken"):
                await replicas.resume(3)
            late = asyncio.create_task(collect(replicas.generate(PROMPT, params(2), session="c")))
            await wait_for_requests(replicas)
            assert request_counts(servers) == [1, 1]
            assert (replicas.version, replicas.stale) == (0, ())
            for server in servers:
                server.failing_paths = set()
            await replicas.resume(3)
            for output, rest in zip(outputs, rests, strict=True):
                output += await rest
                assert versions_of(output) == [0, 0, 3, 3, 3]
                assert_sampled_by(output)
            assert versions_of(await late) == [3, 3]

    run_with_frozen_clock(main())


def test_pause_that_fails_on_all_replicas_can_be_repeated() -> None:
    async def main() -> None:
        async with replica_servers(1) as (replicas, servers):
            servers[0].hold_after, servers[0].failing_paths = 2, {PAUSE}
            stream = replicas.generate(PROMPT, params(5))
            chunks = await take_tokens(stream, 2)
            with pytest.raises(EngineError, match=r"pause failed on all replicas: .*broken"):
                await replicas.pause()
            servers[0].hold_after, servers[0].failing_paths = None, set()
            await replicas.pause()
            servers[0].weights = 1
            await replicas.resume(1)
            chunks += await collect(stream)
            assert versions_of(chunks) == [0, 0, 1, 1, 1]
            assert_sampled_by(chunks)

    run_with_frozen_clock(main())


def test_stale_replica_does_not_hide_that_all_in_use_failed() -> None:
    async def main() -> None:
        async with replica_servers(1) as (replicas, servers), FakeVllm() as further:
            await replicas.add(VllmEngine(further.url, name="other", version=4))
            servers[0].failing_paths = {PAUSE}
            with pytest.raises(EngineError, match="pause failed on all replicas"):
                await replicas.pause()
            servers[0].failing_paths = {RESUME}
            await replicas.pause()
            further.failing_paths = {RESUME}
            with pytest.raises(EngineError, match="resume failed on all replicas"):
                await replicas.resume(5)
            further.failing_paths = set()
            await replicas.resume(5)
            assert replicas.stale == ("0",), "the stale one has the new weights now"
            chunks = await collect(replicas.generate(PROMPT, params(1)))
            assert (versions_of(chunks), request_counts([*servers, further])) == ([5], [0, 1])

    run_with_frozen_clock(main())


def test_replica_of_another_version_is_not_used_before_the_next_update() -> None:
    async def main() -> None:
        async with replica_servers(1) as (replicas, servers), FakeVllm() as old, FakeVllm() as new:
            await replicas.pause()
            servers[0].weights = 5
            await replicas.resume(5)
            await replicas.add(VllmEngine(old.url, name="old"))
            await replicas.add(VllmEngine(new.url, name="new", version=9))
            assert replicas.stale == ("old", "new")
            assert replicas.version == 5
            for session in "abc":
                chunks = await collect(replicas.generate(PROMPT, params(1), session=session))
                assert versions_of(chunks) == [5]
            assert request_counts([*servers, old, new]) == [3, 0, 0]
            await replicas.pause()
            await replicas.resume()
            assert replicas.stale == ("old", "new"), "no new version, no new weights"
            await replicas.pause()
            for server in (*servers, old, new):
                server.weights = 6
            await replicas.resume(6)
            assert replicas.stale == ()
            for session in "def":
                assert_sampled_by(await collect(replicas.generate(PROMPT, params(1), session=session)))
            assert min(request_counts([old, new])) > 0

    run_with_frozen_clock(main())


@settings(max_examples=60, deadline=None)
@given(
    updates=st.lists(
        st.tuples(st.sets(st.integers(0, 2)), st.sets(st.integers(0, 2)), st.integers(0, 20)),
        min_size=1,
        max_size=4,
    ),
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    flush_s=st.sampled_from([0, 60]),
)
def test_every_token_has_the_version_that_sampled_it_whichever_replica_misses_an_update(
    updates: list[tuple[set[int], set[int], int]], counts: list[int], flush_s: float
) -> None:
    async def main() -> None:
        async with replica_servers(3) as (replicas, servers):
            for server in servers:
                server.yields_between_events = True
            prompts = [[number + 1] for number in range(len(counts))]
            tasks = [
                asyncio.create_task(
                    collect(
                        replicas.generate(as_ids(prompt), params(count, flush_s=flush_s), session=str(prompt))
                    )
                )
                for prompt, count in zip(prompts, counts, strict=True)
            ]
            for version, (no_pause, no_resume, ticks) in enumerate(updates, start=1):
                await yield_to_loop(ticks)
                for number, server in enumerate(servers):
                    server.failing_paths = {PAUSE} if number in no_pause else set()
                    server.failing_paths |= {RESUME} if number in no_resume else set()
                try:
                    await replicas.pause()
                except EngineError:
                    for server in servers:
                        server.failing_paths = set()
                    await replicas.pause()
                for server in servers:
                    # A server that missed the pause misses the weights.
                    server.weights = server.weights if PAUSE in server.failing_paths else version
                try:
                    await replicas.resume(version)
                except EngineError:
                    for server in servers:
                        server.failing_paths -= {RESUME}
                    await replicas.resume(version)
            for prompt, count, chunks in zip(prompts, counts, await asyncio.gather(*tasks), strict=True):
                assert len(ids_of(chunks)) == count
                assert_sampled_by(chunks, prompt)

    run_with_frozen_clock(main())


def test_replica_that_cannot_be_paused_is_not_added_to_paused_ones() -> None:
    async def main() -> None:
        async with replica_servers(1) as (replicas, _), FakeVllm() as further:
            further.failing_paths = {"/pause?mode=abort&clear_cache=true"}
            await replicas.pause()
            engine = VllmEngine(further.url)
            with pytest.raises(EngineError, match="broken"):
                await replicas.add(engine)
            assert list(replicas.in_flight) == ["0"]
            await engine.close()

    run_with_frozen_clock(main())
