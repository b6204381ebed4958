from __future__ import annotations

import asyncio

import pytest

from branchline.chat.toy import ToyCodec
from branchline.core.errors import EngineError, EngineInputError, InputError
from branchline.engines.base import Chunk
from branchline.engines.replicas import Replicas
from branchline.engines.scripted import ScriptedEngine
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import (
    EOS,
    PROMPT,
    assert_sampled_by,
    collect,
    continuation,
    ids_of,
    params,
    run,
    take_tokens,
    versions_of,
)
from tests.engines.fake_servers import FakeVllm
from tests.engines.replica_servers import ManualClock, replica_servers, request_counts, wait_for_requests


async def release_more(server: FakeVllm, hold_after: int) -> None:
    """Lets a server that holds go on, up to another number of ids."""
    going, server.proceed = server.proceed, asyncio.Event()
    server.hold_after = hold_after
    server.is_held.clear()
    going.set()
    await server.is_held.wait()


def test_when_all_are_dead_the_call_fails_with_the_last_reason() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            for server in servers:
                server.refusal = (503, b"overloaded")
            with pytest.raises(EngineError, match=r"no replica is left to ask: .*overloaded"):
                await collect(replicas.generate(PROMPT, params()))
            assert request_counts(servers) == [1, 1]
            for server in servers:
                server.refusal = None
            assert ids_of(await collect(replicas.generate(PROMPT, params()))), "marks are no refusal"

    run(main())


def test_wrong_input_is_nobodys_death() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].refusal = (400, b"too long")
            with pytest.raises(EngineInputError, match="too long"):
                await collect(replicas.generate(PROMPT, params()))
            assert replicas.failing == ()
            assert request_counts(servers) == [1, 0]

    run(main())


def test_the_same_session_goes_to_the_same_replica() -> None:
    async def main() -> None:
        async with replica_servers(3) as (replicas, servers):
            for session in ("a", "b", "c", "b", "b", "c"):
                await collect(replicas.generate(PROMPT, params(1), session=session))
            assert request_counts(servers) == [1, 3, 2]
            replicas.release_session("a")
            await collect(replicas.generate(PROMPT, params(1), session="d"))
            assert request_counts(servers) == [2, 3, 2], "a session that ended makes room"

    run(main())


def test_a_new_session_goes_where_the_fewest_calls_are_in_flight() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].hold_after = 1
            held = replicas.generate(PROMPT, params(2), session="a")
            await anext(held)
            assert replicas.in_flight == {"0": 1, "1": 0}
            for session in ("b", "c", ""):
                await collect(replicas.generate(PROMPT, params(1), session=session))
            assert request_counts(servers) == [1, 3]
            servers[0].proceed.set()
            await collect(held)
            assert replicas.in_flight == {"0": 0, "1": 0}
            await collect(replicas.generate(PROMPT, params(1), session="d"))
            assert request_counts(servers) == [2, 3]

    run(main())


def test_a_dead_replicas_sessions_move_and_it_is_tried_again_later() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with replica_servers(2, clock) as (replicas, servers):
            servers[0].refusal = (500, b"")
            await collect(replicas.generate(PROMPT, params(1), session="a"))
            servers[0].refusal = None
            await collect(replicas.generate(PROMPT, params(1), session="a"))
            await collect(replicas.generate(PROMPT, params(1), session="b"))
            assert request_counts(servers) == [1, 3]
            clock.now += replicas.retry_after_s
            assert replicas.failing == ()
            await collect(replicas.generate(PROMPT, params(1), session="c"))
            await collect(replicas.generate(PROMPT, params(1), session="a"))
            assert request_counts(servers) == [2, 4], "what moved stays where it is"

    run(main())


def test_a_removed_replicas_calls_and_sessions_move() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].hold_after = 3
            stream = replicas.generate(PROMPT, params(8), session="a")
            chunks = await take_tokens(stream, 3)
            await replicas.remove("0")
            await servers[0].aborted.wait()
            chunks += await collect(stream)
            assert ids_of(chunks) == continuation(PROMPT, 8)[0]
            await collect(replicas.generate(PROMPT, params(1), session="a"))
            assert request_counts(servers) == [1, 2]
            assert servers[1].bodies[0]["max_tokens"] == 5
            with pytest.raises(InputError, match="'0', expected one of 1"):
                await replicas.remove("0")
            await replicas.remove("1")
            with pytest.raises(EngineError, match="no replica is left"):
                await collect(replicas.generate(PROMPT, params(1), session="a"))

    run(main())


def test_what_had_arrived_of_an_unwatched_answer_moves_with_it() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].hold_after = 3
            stream = replicas.generate(PROMPT, params(8, whole=True), session="a")
            task = asyncio.create_task(collect(stream))
            await servers[0].is_held.wait()
            await replicas.remove("0")
            chunks = await task
            assert ids_of(chunks) == continuation(PROMPT, 8)[0]
            assert servers[1].bodies[0]["max_tokens"] == 5
            assert [len(chunk.ids) for chunk in chunks] == [3, 5]

    run(main())


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("per_event", [1, 3])
def test_what_had_arrived_for_a_slow_reader_is_recorded_once_when_its_replica_is_removed(
    per_event: int, goes_on: bool
) -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].hold_after, servers[0].ids_per_event = 3, per_event
            record: list[Chunk] = []
            stream = replicas.generate(PROMPT, params(9, left=record.append), session="a")
            record += await take_tokens(stream, 3)
            await release_more(servers[0], 6)
            await wait_for_requests(replicas)
            await replicas.remove("0")
            if goes_on:
                record += await collect(stream)
                assert [len(body["prompt"]) for body in servers[1].bodies] == [len(PROMPT) + 6]
            else:
                await stream.aclose()
            assert ids_of(record) == continuation(PROMPT, 9 if goes_on else 6)[0]

    run(main())


def test_a_reader_that_leaves_among_what_had_arrived_leaves_nothing_of_it_behind() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].hold_after = 2
            left: list[Chunk] = []
            stream = replicas.generate(PROMPT, params(9, left=left.append), session="a")
            taken = await take_tokens(stream, 2)
            await release_more(servers[0], 4)
            await wait_for_requests(replicas)
            servers[0].weights = 1
            await replicas.resume(1)  # What has arrived is a chunk of its own, under the old version.
            await release_more(servers[0], 6)
            await wait_for_requests(replicas)
            await replicas.remove("0")
            taken.append(await anext(stream))
            assert versions_of(taken) == [0] * 4
            await stream.aclose()
            assert versions_of(left) == [1, 1]
            assert_sampled_by([*taken, *left])
            assert request_counts(servers) == [1, 0]

    run(main())


def test_an_engine_that_does_not_end_its_calls_when_it_is_closed_loses_them_all_the_same() -> None:
    async def main() -> None:
        held = ScriptedEngine(ToyCodec.chatml(), lambda _: "never", name="held", gate=asyncio.Event())
        replicas = Replicas([held])
        task = asyncio.create_task(collect(replicas.generate(PROMPT, params(8))))
        await asyncio.sleep(0)
        await replicas.add(ScriptedEngine(ToyCodec.chatml(), lambda _: "moved"))
        assert replicas.in_flight == {"held": 1, "scripted": 0}
        await replicas.remove("held")
        assert len(ids_of(await task)) > 0
        assert held.aborted_count == 1

    run(main())


def test_a_closed_stream_is_closed_where_it_runs_when_its_closing_returns() -> None:
    async def main() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), lambda _: "a reply of some tokens")
        stream = Replicas([engine]).generate(PROMPT, params(8))
        await anext(stream)
        await stream.aclose()
        assert engine.aborted_count == 1

    run(main())


def test_a_replica_can_be_added_while_others_run() -> None:
    async def main() -> None:
        async with replica_servers(1) as (replicas, servers), FakeVllm() as further:
            await replicas.add(VllmEngine(further.url))
            await collect(replicas.generate(PROMPT, params(1), session="a"))
            await collect(replicas.generate(PROMPT, params(1), session="b"))
            assert request_counts([*servers, further]) == [1, 1]
            with pytest.raises(InputError, match="in use already"):
                await replicas.add(VllmEngine(further.url))
            with pytest.raises(InputError, match="processed logprobs, expected raw"):
                await replicas.add(VllmEngine(further.url, name="x", logprob_kind="processed"))

    run(main())


def test_closing_a_stream_aborts_it_where_it_runs() -> None:
    async def main() -> None:
        async with replica_servers(1) as (replicas, servers):
            servers[0].hold_after = 1
            stream = replicas.generate(PROMPT, params())
            await anext(stream)
            await stream.aclose()
            await servers[0].aborted.wait()
            assert replicas.in_flight == {"0": 0}

    run(main())


def test_what_the_replicas_are_together() -> None:
    async def main() -> None:
        small = VllmEngine("http://127.0.0.1:1", max_context=10, version=2)
        large = VllmEngine("http://127.0.0.1:2/v1", max_context=20, version=2)
        replicas = Replicas([small, large])
        assert (replicas.max_context, replicas.version, replicas.logprob_kind) == (10, 2, "raw")
        assert replicas.engines == (small, large)
        assert list(replicas.in_flight) == ["vllm@127.0.0.1:1", "vllm@127.0.0.1:2"]
        await replicas.close()
        assert Replicas().max_context is None
        assert EOS not in continuation(PROMPT, 100)[0], "the fake's ids are no stop ids by chance"

    run(main())
