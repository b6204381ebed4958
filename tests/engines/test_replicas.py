from __future__ import annotations

import asyncio

import pytest

from branchline.chat.toy import ToyCodec
from branchline.core.errors import EngineError, EngineInputError, InputError
from branchline.engines.replicas import Replicas
from branchline.engines.scripted import ScriptedEngine
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import (
    EOS,
    PROMPT,
    collect,
    continuation,
    ids_of,
    params,
    take_tokens,
)
from tests.engines.fake_servers import FakeVllm
from tests.engines.manual_clock import run_with_frozen_clock
from tests.engines.replica_servers import (
    ManualClock,
    replica_servers,
    request_counts,
    wait_for_checks,
    wait_for_requests,
)


def test_call_fails_with_the_last_error_when_all_replicas_fail() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            for server in servers:
                server.refusal = (503, b"overloaded")
            with pytest.raises(EngineError, match=r"no usable replica: .*overloaded"):
                await collect(replicas.generate(PROMPT, params()))
            assert request_counts(servers) == [1, 1]
            for server in servers:
                server.refusal = None
            assert ids_of(await collect(replicas.generate(PROMPT, params()))), "used for lack of others"

    run_with_frozen_clock(main())


def test_invalid_request_is_not_a_replica_failure() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].refusal = (400, b"too long")
            with pytest.raises(EngineInputError, match="too long"):
                await collect(replicas.generate(PROMPT, params()))
            assert replicas.unavailable == ()
            assert request_counts(servers) == [1, 0]

    run_with_frozen_clock(main())


def test_session_stays_on_its_replica() -> None:
    async def main() -> None:
        async with replica_servers(3) as (replicas, servers):
            for session in ("a", "b", "c", "b", "b", "c"):
                await collect(replicas.generate(PROMPT, params(1), session=session))
            assert request_counts(servers) == [1, 3, 2]
            replicas.release_session("a")
            await collect(replicas.generate(PROMPT, params(1), session="d"))
            assert request_counts(servers) == [2, 3, 2], "the ended session no longer counts"

    run_with_frozen_clock(main())


def test_new_session_goes_to_the_replica_with_the_fewest_calls() -> None:
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

    run_with_frozen_clock(main())


def test_failed_replica_gets_no_calls_until_a_check_succeeds_and_its_sessions_return() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with replica_servers(2, clock) as (replicas, servers):
            servers[0].refusal = (500, b"")
            await collect(replicas.generate(PROMPT, params(1), session="a"))
            await wait_for_checks(replicas)
            servers[0].refusal = None
            await collect(replicas.generate(PROMPT, params(1), session="a"))
            await collect(replicas.generate(PROMPT, params(1), session="b"))
            assert request_counts(servers) == [1, 3]
            clock.now += replicas.retry_after_s
            await collect(replicas.generate(PROMPT, params(1), session="c"))
            assert request_counts(servers) == [1, 4], "the check comes first"
            await wait_for_checks(replicas)
            assert replicas.unavailable == ()
            await collect(replicas.generate(PROMPT, params(1), session="a"))
            assert request_counts(servers) == [2, 4], "a session returns to its home"

    run_with_frozen_clock(main())


def test_calls_and_sessions_of_a_removed_replica_move() -> None:
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
            with pytest.raises(EngineError, match="no usable replica"):
                await collect(replicas.generate(PROMPT, params(1), session="a"))

    run_with_frozen_clock(main())


def test_tokens_that_arrived_before_a_replica_was_removed_are_kept() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].hold_after = 3
            stream = replicas.generate(PROMPT, params(8, flush_s=60), session="a")
            task = asyncio.create_task(collect(stream))
            await servers[0].is_held.wait()
            await wait_for_requests(replicas)
            await replicas.remove("0")
            chunks = await task
            assert ids_of(chunks) == continuation(PROMPT, 8)[0]
            assert servers[1].bodies[0]["max_tokens"] == 5

    run_with_frozen_clock(main())


def test_calls_move_from_a_removed_engine_that_does_not_end_them_on_close() -> None:
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

    run_with_frozen_clock(main())


def test_closing_a_generation_closes_that_of_the_replica_before_it_returns() -> None:
    async def main() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), lambda _: "a reply of some tokens")
        stream = Replicas([engine]).generate(PROMPT, params(8))
        await anext(stream)
        await stream.aclose()
        assert engine.aborted_count == 1

    run_with_frozen_clock(main())


def test_replica_can_be_added_while_others_run() -> None:
    async def main() -> None:
        async with replica_servers(1) as (replicas, servers), FakeVllm() as further:
            await replicas.add(VllmEngine(further.url))
            await collect(replicas.generate(PROMPT, params(1), session="a"))
            await collect(replicas.generate(PROMPT, params(1), session="b"))
            assert request_counts([*servers, further]) == [1, 1]
            with pytest.raises(InputError, match="in use already"):
                await replicas.add(VllmEngine(further.url))
            with pytest.raises(InputError, match="got processed logprobs, expected raw"):
                await replicas.add(VllmEngine(further.url, name="x", logprob_kind="processed"))

    run_with_frozen_clock(main())


def test_closing_a_generation_aborts_it_at_the_server() -> None:
    async def main() -> None:
        async with replica_servers(1) as (replicas, servers):
            servers[0].hold_after = 1
            stream = replicas.generate(PROMPT, params())
            await anext(stream)
            await stream.aclose()
            await servers[0].aborted.wait()
            assert replicas.in_flight == {"0": 0}

    run_with_frozen_clock(main())


def test_properties_combine_those_of_the_replicas() -> None:
    async def main() -> None:
        small = VllmEngine("http://127.0.0.1:1", max_context=10, version=2)
        large = VllmEngine("http://127.0.0.1:2/v1", max_context=20, version=2)
        replicas = Replicas([small, large])
        assert (replicas.max_context, replicas.version, replicas.logprob_kind) == (10, 2, "raw")
        assert replicas.engines == (small, large)
        assert list(replicas.in_flight) == ["vllm@127.0.0.1:1", "vllm@127.0.0.1:2"]
        await replicas.close()
        assert Replicas().max_context is None
        assert EOS not in continuation(PROMPT, 100)[0], "the fake model never samples EOS by chance"

    run_with_frozen_clock(main())
