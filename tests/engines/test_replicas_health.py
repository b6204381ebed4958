"""Health of replicas: which faults count against one, and how its sessions leave it and return."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.errors import EngineBusyError, EngineError
from branchline.core.token_arrays import as_ids
from branchline.engines.replica_pool import CHECK_TOKENS
from branchline.engines.replicas import Replicas
from tests.engines.fake_model import (
    PROMPT,
    collect,
    continuation,
    float32,
    ids_of,
    logprobs_of,
    params,
    take_tokens,
)
from tests.engines.fake_servers import FakeVllm
from tests.engines.manual_clock import advance, run_with_frozen_clock, yield_to_loop
from tests.engines.replica_servers import ManualClock, replica_servers, request_counts, wait_for_checks

POISON = 99_999


async def call_sessions(replicas: Replicas, names: list[str]) -> None:
    for name in names:
        await collect(replicas.generate(PROMPT, params(1), session=name))


def refuse_poison(servers: list[FakeVllm]) -> None:
    for server in servers:
        server.refusal, server.refused_id = (500, b"assertion failed"), POISON


def test_request_that_every_replica_answers_with_500_leaves_the_balance_as_it_was() -> None:
    async def main() -> None:
        async with replica_servers(4) as (replicas, servers):
            first, second = [f"a{i}" for i in range(80)], [f"b{i}" for i in range(80)]
            await call_sessions(replicas, first)
            assert request_counts(servers) == [20, 20, 20, 20]
            refuse_poison(servers)
            for _ in range(3):
                with pytest.raises(EngineError, match="assertion failed"):
                    await collect(replicas.generate(as_ids([*PROMPT, POISON]), params(1), session="a0"))
            assert replicas.unavailable == ()
            await wait_for_checks(replicas)
            assert replicas.unavailable == ()
            for server in servers:
                server.requests.clear()
            await call_sessions(replicas, first + second)
            assert request_counts(servers) == [40, 40, 40, 40]

    run_with_frozen_clock(main())


@pytest.mark.parametrize("status", [429, 503])
def test_busy_replicas_keep_their_status_and_retry_after(status: int) -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            for server in servers:
                server.refusal, server.retry_after = (status, b"queue is full"), "7"
            with pytest.raises(EngineBusyError, match="queue is full") as raised:
                await collect(replicas.generate(PROMPT, params(1)))
            assert (raised.value.retry_after, raised.value.is_overloaded) == ("7", status == 503)
            assert request_counts(servers) == [1, 1], "another replica may have room"
            assert replicas.unavailable == ()
            assert not any(len(body["prompt"]) == 1 for server in servers for body in server.bodies)

    run_with_frozen_clock(main())


def test_sessions_leave_an_unreachable_replica_and_return_when_a_check_succeeds() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with replica_servers(3, clock) as (replicas, servers):
            names = [f"s{i}" for i in range(9)]
            await call_sessions(replicas, names)
            homes = request_counts(servers)
            assert homes == [3, 3, 3]
            servers[0].kill()
            await call_sessions(replicas, names)
            assert replicas.unavailable == ("0",)
            away = request_counts(servers)
            await call_sessions(replicas, names)
            assert [b - a for a, b in zip(away, request_counts(servers), strict=True)] == [
                after - before for before, after in zip(homes, away, strict=True)
            ], "a session stays where it went"
            clock.now += replicas.retry_after_s
            await call_sessions(replicas, names)
            await wait_for_checks(replicas)
            assert replicas.unavailable == ("0",), "the check failed"
            await servers[0].restart()
            clock.now += replicas.retry_after_s
            await call_sessions(replicas, names[:1])
            await wait_for_checks(replicas)
            assert replicas.unavailable == ()
            for server in servers:
                server.requests.clear()
            await call_sessions(replicas, names)
            assert request_counts(servers) == homes

    run_with_frozen_clock(main())


def test_no_call_is_sent_to_a_failing_replica_while_others_are_in_use() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with replica_servers(2, clock) as (replicas, servers):
            servers[0].refusal = (500, b"CUDA error")
            await call_sessions(replicas, ["a"])
            await wait_for_checks(replicas)
            assert replicas.unavailable == ("0",), "its check fails too"
            for _ in range(3):
                clock.now += replicas.retry_after_s
                await call_sessions(replicas, ["a", "b"])
                await wait_for_checks(replicas)
            assert request_counts(servers) == [1, 7]
            checks = [body for body in servers[0].bodies if len(body["prompt"]) == 1]
            assert [body["max_tokens"] for body in checks] == [CHECK_TOKENS] * 4

    run_with_frozen_clock(main())


def test_call_of_a_hung_replica_continues_on_another() -> None:
    async def main() -> None:
        async with replica_servers(2, first_token_timeout_s=20, token_timeout_s=500) as (replicas, servers):
            servers[0].hold_after = 0
            waiting = asyncio.create_task(collect(replicas.generate(PROMPT, params(4), session="a")))
            await servers[0].is_held.wait()
            await advance(19)
            assert request_counts(servers) == [1, 0]
            await advance(1)
            ids, _ = continuation(PROMPT, 4)
            assert ids_of(await waiting) == ids
            assert replicas.unavailable == ("0",)
            await call_sessions(replicas, ["a", "b"])
            assert request_counts(servers) == [1, 3]

    run_with_frozen_clock(main())


@pytest.mark.parametrize("held", [1, 3])
def test_call_of_a_replica_that_hangs_between_tokens_continues_after_them(held: int) -> None:
    async def main() -> None:
        async with replica_servers(2, first_token_timeout_s=500, token_timeout_s=20) as (replicas, servers):
            servers[0].hold_after = held
            stream = replicas.generate(PROMPT, params(6), session="a")
            chunks = await take_tokens(stream, held)
            waiting = asyncio.create_task(collect(stream))
            await yield_to_loop()
            await advance(19)
            assert request_counts(servers) == [1, 0]
            await advance(1)
            chunks += await waiting
            ids, logprobs = continuation(PROMPT, 6)
            assert ids_of(chunks) == ids
            assert logprobs_of(chunks) == pytest.approx(logprobs)
            assert servers[1].bodies[0]["prompt"] == [*PROMPT, *ids[:held]]
            assert replicas.unavailable == ("0",)

    run_with_frozen_clock(main())


def test_timeout_of_a_replica_that_answers_others_moves_only_that_call() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with replica_servers(2, clock, first_token_timeout_s=20) as (replicas, servers):
            servers[0].hold_after = 0
            waiting = asyncio.create_task(collect(replicas.generate(PROMPT, params(2), session="a")))
            await servers[0].is_held.wait()
            servers[0].hold_after = None
            clock.now += 1
            await call_sessions(replicas, ["b"])
            replicas._replicas["0"].last_chunk_at = clock.now  # "b" may be on the other replica.
            await advance(20)
            assert ids_of(await waiting) == continuation(PROMPT, 2)[0]
            assert replicas.unavailable == ()

    run_with_frozen_clock(main())


def test_silent_replica_loses_all_its_calls_at_the_first_timeout() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with replica_servers(2, clock, first_token_timeout_s=20) as (replicas, servers):
            servers[0].hold_after = servers[1].hold_after = 0
            first = asyncio.create_task(collect(replicas.generate(PROMPT, params(2), session="a")))
            await servers[0].is_held.wait()
            await advance(10)
            replicas._replicas["1"].excluded = True
            later = asyncio.create_task(collect(replicas.generate(PROMPT, params(2), session="b")))
            while len(servers[0].bodies) < 2:
                await asyncio.sleep(0)
            servers[1].hold_after, replicas._replicas["1"].excluded = None, False
            await advance(10)
            assert ids_of(await first) == ids_of(await later) == continuation(PROMPT, 2)[0]
            assert replicas.in_flight == {"0": 0, "1": 0}
            assert request_counts(servers) == [2, 2]

    run_with_frozen_clock(main())


def test_first_timeout_of_a_silent_replica_moves_calls_whose_own_timeout_is_longer() -> None:
    async def main() -> None:
        clock = ManualClock()
        timeouts = {"first_token_timeout_s": 20.0, "token_timeout_s": 600.0}
        async with replica_servers(2, clock, **timeouts) as (replicas, servers):
            await call_sessions(replicas, ["a", "other", "b"])
            servers[0].hold_after = 1
            clock.now += 1
            waiting = asyncio.create_task(collect(replicas.generate(PROMPT, params(3), session="a")))
            while replicas._replicas["0"].last_chunk_at < clock.now:
                await asyncio.sleep(0)
            clock.now += 1
            servers[0].hold_after = 0
            servers[0].is_held.clear()
            first = asyncio.create_task(collect(replicas.generate(PROMPT, params(2), session="b")))
            await servers[0].is_held.wait()
            await advance(20)
            assert ids_of(await first) == continuation(PROMPT, 2)[0]
            assert ids_of(await waiting) == continuation(PROMPT, 3)[0]
            assert replicas.unavailable == ("0",)

    run_with_frozen_clock(main())


@pytest.mark.parametrize("silent_s", [0.0, 30.0])
def test_client_that_leaves_a_silent_replica_counts_against_it(silent_s: float) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with replica_servers(2, clock) as (replicas, servers):
            servers[0].hold_after = 0
            waiting = asyncio.create_task(collect(replicas.generate(PROMPT, params(2), session="a")))
            await servers[0].is_held.wait()
            clock.now += silent_s
            waiting.cancel()
            await asyncio.wait([waiting])
            assert replicas.unavailable == (("0",) if silent_s else ())
            if silent_s:
                await call_sessions(replicas, ["a"])
                assert request_counts(servers) == [1, 1], "the next attempt goes elsewhere"
                servers[0].proceed.set()
                await wait_for_checks(replicas)
                assert replicas.unavailable == (), "the check got its token"
                await call_sessions(replicas, ["a"])
                assert request_counts(servers) == [2, 1]

    run_with_frozen_clock(main())


def test_client_that_leaves_a_replica_which_answers_others_moves_its_next_attempt_only() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with replica_servers(2, clock) as (replicas, servers):
            servers[0].hold_after = 0
            waiting = asyncio.create_task(collect(replicas.generate(PROMPT, params(2), session="a")))
            await servers[0].is_held.wait()
            clock.now += 30
            replicas._replicas["0"].last_chunk_at = clock.now  # Another call got a token.
            waiting.cancel()
            await asyncio.wait([waiting])
            assert replicas.unavailable == ()
            servers[0].hold_after = None
            await call_sessions(replicas, ["a"])
            assert request_counts(servers) == [1, 1]
            await call_sessions(replicas, ["a"])
            assert request_counts(servers) == [2, 1], "it is at home again"

    run_with_frozen_clock(main())


def test_all_attempts_of_the_next_call_avoid_the_replica_that_was_left() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with replica_servers(3, clock) as (replicas, servers):
            servers[0].hold_after = 0
            waiting = asyncio.create_task(collect(replicas.generate(PROMPT, params(2), session="a")))
            await servers[0].is_held.wait()
            clock.now += 30
            replicas._replicas["0"].last_chunk_at = clock.now  # Another call got a token.
            waiting.cancel()
            await asyncio.wait([waiting])
            servers[1].die_after = 1
            chunks = await collect(replicas.generate(PROMPT, params(2), session="a"))
            assert ids_of(chunks) == continuation(PROMPT, 2)[0]
            assert request_counts(servers) == [1, 1, 1]

    run_with_frozen_clock(main())


def test_consumer_that_stops_reading_does_not_count_against_the_replica() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with replica_servers(2, clock) as (replicas, servers):
            servers[0].hold_after = 1
            stream = replicas.generate(PROMPT, params(5), session="a")
            await take_tokens(stream, 1)
            clock.now += 100
            await stream.aclose()
            assert replicas.unavailable == ()
            servers[0].hold_after = None
            await call_sessions(replicas, ["a"])
            assert request_counts(servers) == [2, 0]

    run_with_frozen_clock(main())


def test_close_and_remove_end_running_checks() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with replica_servers(3, clock) as (replicas, servers):
            for server in servers[:2]:
                server.refusal = (500, b"")
            await call_sessions(replicas, ["a"])
            await wait_for_checks(replicas)
            assert replicas.unavailable == ("0", "1")
            for server in servers[:2]:
                server.refusal, server.hold_after = None, 0
            clock.now += replicas.retry_after_s
            await call_sessions(replicas, ["a"])
            checks = [replica.check for replica in replicas._replicas.values()]
            await replicas.remove("0")
            await replicas.close()
            await yield_to_loop()
            assert [check and check.done() for check in checks] == [True, True, None]

    run_with_frozen_clock(main())


def test_a_removed_replica_is_neither_checked_nor_excluded(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].hold_after = 3
            task = asyncio.create_task(collect(replicas.generate(PROMPT, params(8), session="a")))
            await servers[0].is_held.wait()
            removed = replicas._replicas["0"]
            await replicas.remove("0")
            assert ids_of(await task) == continuation(PROMPT, 8)[0]
            assert removed.check is None
            await yield_to_loop()

    run_with_frozen_clock(main())
    assert not caplog.records


def test_ready_needs_one_replica_and_excludes_those_that_do_not_answer() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with replica_servers(2, clock) as (replicas, servers):
            with pytest.raises(EngineError):
                await replicas.ready()
            answers = {"/health": None, "/v1/models": {"data": [{"id": "tiny", "max_model_len": 64}]}}
            servers[1].json_by_path = answers
            await replicas.ready()
            assert replicas.unavailable == ("0",)
            servers[0].json_by_path = {
                **answers,
                "/v1/models": {"data": [{"id": "tiny", "max_model_len": 32}]},
            }
            clock.now += replicas.retry_after_s
            await call_sessions(replicas, ["a"])
            await wait_for_checks(replicas)
            assert (replicas.unavailable, replicas.max_context) == ((), 32)

    run_with_frozen_clock(main())


async def time_out_when_held(replicas: Replicas, name: str, server: FakeVllm) -> None:
    """Moves the clock while the only call waits for this server."""
    while True:
        await server.is_held.wait()
        while replicas.in_flight[name]:
            await advance(20)
        server.is_held.clear()


@settings(max_examples=40, deadline=None)
@given(
    faults=st.lists(
        st.tuples(st.sampled_from(["die", "hang", "refuse", "busy", "lie"]), st.integers(0, 6)),
        min_size=1,
        max_size=4,
    ),
    ids_per_event=st.integers(1, 3),
    flush_s=st.sampled_from([0, 60]),
)
def test_any_mix_of_faults_loses_and_repeats_no_token(
    faults: list[tuple[str, int]], ids_per_event: int, flush_s: float
) -> None:
    async def main() -> None:
        count = len(faults) + 1
        async with (
            replica_servers(count, first_token_timeout_s=20, token_timeout_s=20) as (replicas, servers),
            asyncio.TaskGroup() as others,
        ):
            waits: list[asyncio.Task[None]] = []
            for number, (server, (fault, position)) in enumerate(zip(servers, faults, strict=False)):
                server.ids_per_event = ids_per_event
                server.die_after = position if fault == "die" else None
                if fault == "hang":
                    server.hold_after = position
                    waits.append(others.create_task(time_out_when_held(replicas, str(number), server)))
                server.lie = "logprob" if fault == "lie" else None
                status = {"refuse": 500, "busy": 503}.get(fault)
                server.refusal = None if status is None else (status, b"")
            chunks = await collect(replicas.generate(PROMPT, params(12, flush_s=flush_s), session="a"))
            ids, logprobs = continuation(PROMPT, 12)
            assert ids_of(chunks) == ids
            assert logprobs_of(chunks) == float32(logprobs)
            assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
            assert sum(replicas.in_flight.values()) == 0
            for wait in waits:
                wait.cancel()

    run_with_frozen_clock(main())
