"""The clients of the control API, against a gateway with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from branchline import AsyncClient, Client, Export, ExportPolicy, Gateway, ToyCodec, Tree, training_rows
from branchline.core.errors import GatewayError, InputError, SessionError
from branchline.engines.replicas import Replicas
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.engines.vllm import VllmEngine
from branchline.export.credit import group_statistics
from branchline.export.jsonl import sample_from_json, sample_to_json
from branchline.gateway.config import GatewayConfig
from branchline.runtime.router import Router
from tests.client.harness import CLIENT_THREADS, KINDS, DroppingProxy, open_client
from tests.engines.fake_servers import FakeVllm
from tests.gateway.harness import Agent, agent, run
from tests.hang import HANG_S
from tests.loop.test_http_model import fake_server, http_response
from tests.runtime.test_session_snapshot import as_json, assert_equal_trees

both = pytest.mark.parametrize("kind", KINDS)


async def ask(a: Agent, session: Any, *messages: str, **body: Any) -> str:
    """One turn of an agent that knows only the URL and the key of its session."""
    wire = [
        {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(messages)
    ]
    response = await a.http.post(
        f"{session.base_url}/chat/completions",
        json={"model": "m", "messages": wire, **body},
        headers={"authorization": f"Bearer {session.api_key}"},
    )
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@both
def test_the_life_of_a_session_in_another_thread(kind: str) -> None:
    async def test() -> None:
        async with agent("A1", "A2") as a, open_client(kind, a.gateway.url, a.gateway.admin_key) as client:
            session = await client.open_session(
                group="doors", metadata={"n": 1}, sampling={"temperature": 1.0}
            )
            assert session.base_url == f"{a.gateway.url}/sessions/{session.id}/v1"
            waiting = asyncio.create_task(session.wait())
            assert await ask(a, session, "p") == "A1"
            assert await ask(a, session, "p", "A1", "q") == "A2"
            await session.reward(0.25, note="fine")
            await session.post_rewards([{"score": 1.0, "turn": 2}, {"score": 0.5, "turn": 1, "why": "x"}])
            await session.reward(True, turn=1, id="a", note="fine", extras={"turns": 2})
            with pytest.raises(
                InputError, match="agent: got 'critic', expected an agent of this session: none"
            ):
                await session.reward(1.0, agent="critic")
            with pytest.raises(InputError, match="turns: got 1, expected other keys: did you mean `turn`"):
                await session.reward(1.0, turns=1)
            assert not waiting.done()
            await session.complete("done")
            assert await waiting == "completed"
            view = await session.view()
            assert (view.state, view.reason, view.calls, view.reward) == ("completed", "done", 2, 0.25)
            assert (view.group, view.metadata) == ("doors", {"n": 1})
            export = await session.finalize(reason="end")
            assert isinstance(export, Export)
            assert export.report.is_balanced
            assert export.samples[0].reward == 0.25
            assert export.samples[0].reward_extras == '{"note":"fine"}'
            assert sorted((span.turn, span.score, span.extras) for span in export.samples[0].rewards) == [
                (1, 0.5, '{"why":"x"}'),
                (1, 1.0, '{"note":"fine","turns":2}'),
                (2, 1.0, ""),
            ]
            assert [listed.id for listed in await client.sessions(state="finalized", group="doors")] == [
                session.id
            ]
            assert await session.wait() == "finalized"
            await session.delete()
            await session.delete()
            with pytest.raises(SessionError, match="no session") as caught:
                await session.view()
            assert caught.value.kind == "unknown"

    run(test)


def test_the_life_of_a_session_in_another_process() -> None:
    program = (
        "import json, sys, branchline\n"
        "url, key, agent = sys.argv[1:]\n"
        "with branchline.Client(url, key) as client:\n"
        "    session = client.session(agent)\n"
        "    session.reward(0.5, turn=1)\n"
        "    export = session.finalize()\n"
        "    [sample] = export.samples\n"
        "    print(json.dumps([sample.response_ids.tolist(), sample.reward, session.tree().token_count]))\n"
    )

    async def test() -> None:
        async with agent("A1") as a:
            await a.ask_text("p")
            arguments = [sys.executable, "-c", program, a.gateway.url, a.gateway.admin_key, a.session.id]
            done = await asyncio.to_thread(
                subprocess.run, arguments, capture_output=True, text=True, check=True
            )
            own = await a.session.export()
            assert json.loads(done.stdout) == [
                own.samples[0].response_ids.tolist(),
                own.samples[0].reward,
                a.session.managed.session.tree.token_count,
            ]
            assert a.session.managed.state == "finalized"

    run(test)


@both
def test_samples_tree_and_trajectory_are_those_of_the_gateway(kind: str) -> None:
    async def test() -> None:
        codec = ToyCodec.chatml(strip_thinking=True)
        engine = ScriptedEngine(codec, replies("A1", "A2", "A3", "A4"))
        async with agent(engine=engine) as a, open_client(kind, a.gateway.url, a.gateway.admin_key) as client:
            await a.ask_text("p")
            await a.ask_text("p", "A1", "q")
            await a.ask_text("p", "edited", "q", n=2)
            await a.session.reward(1.0, turn=1)
            session, managed = client.session(a.session.id), a.session.managed
            tree = await session.tree()
            assert isinstance(tree, Tree)
            assert_equal_trees(tree, managed.session.tree)
            for policy in (None, ExportPolicy(shares="first", include_missing_logprobs=True)):
                one, other = await session.export(policy), managed.export(policy)
                assert as_json(one.samples) == as_json(other.samples)
                assert (one.report, one.trained_nodes) == (other.report, other.trained_nodes)
                left, right = await session.trajectory(policy), managed.trajectory(policy)
                assert as_json(left.samples) == as_json(right.samples)
                assert (left.history, left.report) == (right.history, right.report)
            written = (await a.get("/samples"))["samples"]
            read = [sample_from_json(raw) for raw in written]
            assert as_json((await session.export()).samples) == as_json(read)
            assert msgspec.json.encode(sample_to_json(read[0])) in as_json(read)

    run(test)


@both
def test_a_group_is_the_trajectories_of_its_ended_sessions(kind: str) -> None:
    async def test() -> None:
        async with agent(*"ABC") as a, open_client(kind, a.gateway.url, a.gateway.admin_key) as client:
            sessions = [await client.open_session(group="g") for _ in range(3)]
            other = await client.open_session(group="h")
            for session in sessions:
                await ask(a, session, "p")
            await sessions[0].reward(1.0)
            await sessions[0].finalize()
            await sessions[1].abort("broken")
            await other.complete()
            group = await client.trajectory_group("g")
            assert group.id == "g"
            assert [trajectory.session for trajectory in group] == [session.id for session in sessions[:2]]
            assert [trajectory.failed for trajectory in group] == [False, True]
            assert group.trajectories[0].reward == 1.0
            assert not group.trajectories[1].samples
            assert len((await sessions[1].export(include_aborted=True)).samples) == 1

    run(test)


@both
def test_a_session_without_an_answered_call_is_left_out_of_its_group(kind: str) -> None:
    async def test() -> None:
        async with agent(*"AB") as a, open_client(kind, a.gateway.url, a.gateway.admin_key) as client:
            for score in (0.0, 1.0, 10.0):
                session = await client.open_session(group="g")
                if score < 10:
                    await ask(a, session, "p")
                await session.reward(score)
                await session.finalize()
            group = await client.trajectory_group("g")
            assert [trajectory.failed for trajectory in group] == [False, False, True]
            assert group_statistics(group).mean == 0.5
            rows = training_rows([group], group_std="none")
            assert [float(row.advantages[-1]) for row in rows] == [-0.5, 0.5]

    run(test)


@both
def test_wait_returns_the_state_at_its_timeout_and_survives_many_polls(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr("branchline.client.async_client._WAIT_S", 0.02)
        async with agent("x") as a, open_client(kind, a.gateway.url, a.gateway.admin_key) as client:
            session = client.session(a.session.id)
            assert await session.wait(0) == "open"
            assert await session.wait(0.07) == "open"
            waiting = asyncio.create_task(session.wait())
            await asyncio.sleep(0.07)
            assert not waiting.done()
            await session.abort()
            assert await waiting == "aborted"

    run(test)


@both
def test_policy_and_engines(kind: str) -> None:
    async def test() -> None:
        async with FakeVllm() as one, FakeVllm() as two:
            for server in (one, two):
                server.json_by_path = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}
            router = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)
            async with (
                agent(gateway_engine=router) as a,
                open_client(kind, a.gateway.url, a.gateway.admin_key) as client,
            ):
                [first] = await client.engines()
                assert (await client.health()).status == "ok"
                assert len(await client.add_engine(two.url, 0)) == 2
                assert (await client.ready()).status == "ready"
                assert (await client.pause()).paused
                assert (await client.policy()).paused
                assert (await client.ready()).checks["policy"] == "paused"
                resumed = await client.resume(3)
                assert (resumed.paused, resumed.version, router.version) == (False, 3, 3)
                [second] = await client.remove_engine(first.name)
                assert (second.version, second.behind) == (3, False)
                with pytest.raises(InputError, match=r"DELETE /engines: status 400: .* is the last one"):
                    await client.remove_engine(second.name)
                with pytest.raises(InputError, match=r"version: got 2, expected 3"):
                    await client.resume(2)

    run(test)


@both
def test_errors_name_the_request_the_status_and_the_code(kind: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            async with open_client(kind, a.gateway.url, a.gateway.admin_key) as client:
                session = await client.open_session(id="s1")
                with pytest.raises(SessionError, match=r"^POST /sessions: status 409 \(exists\): session s1"):
                    await client.open_session(id="s1", group="other")
                with pytest.raises(InputError, match=r"^POST /sessions: status 400: .*unknown field `grup`"):
                    await client.open_session(grup="g")
                with pytest.raises(InputError, match="turn: got 0, expected the number of an answer"):
                    await session.reward(1.0, turn=0)
                with pytest.raises(InputError, match=r"status 400: turn: got 9, .*conversation has 0"):
                    await session.reward(1.0, turn=9)
                await session.abort()
                with pytest.raises(SessionError, match=r"status 409 \(closed\): session s1 is aborted"):
                    await session.reward(1.0)
            async with open_client(kind, a.gateway.url, "wrong") as client:
                with pytest.raises(SessionError, match="this needs the admin key") as caught:
                    await client.open_session()
                assert caught.value.kind == "forbidden"
                by_control_key = client.session("s1", control_key=session.control_key)
                assert (await by_control_key.view()).state == "aborted"

    run(test)


@both
def test_a_request_whose_response_is_lost_has_one_effect(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with FakeVllm() as one, FakeVllm() as two:
            for server in (one, two):
                server.json_by_path = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}
            router = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)
            async with (
                agent(gateway_engine=router) as a,
                DroppingProxy(a.gateway.url).run() as proxy,
                open_client(kind, proxy.url, a.gateway.admin_key) as client,
            ):
                session = await client.open_session(group="g")
                managed = a.gateway.sessions.get(session.id)
                assert len(a.gateway.sessions) == 2  # and the session of the harness
                assert a.gateway.sessions.by_api_key(session.api_key) is managed
                await session.reward(1.0)
                await session.post_rewards([{"score": 0.5}, {"score": 0.25, "note": "x"}])
                last = {"score": 0.25, "extras": {"note": "x"}}
                assert managed.rewards == [{"score": 1.0}, {"score": 0.5}, last]
                assert len(await client.add_engine(two.url)) == 2
                assert (await client.pause()).paused
                assert (await client.resume(1)).version == 1
                assert len(await client.remove_engine(router.describe_replicas()[0]["name"])) == 1
                await session.complete()
                await session.finalize()
                await session.delete()
                assert session.id not in {other.id for other in a.gateway.sessions}
                assert proxy.seen
                assert set(proxy.seen.values()) == {2}

    run(test)


@both
def test_a_reward_of_a_lost_response_counts_although_the_session_ended_meanwhile(kind: str) -> None:
    async def test() -> None:
        async with (
            agent("x") as a,
            DroppingProxy(a.gateway.url).run() as proxy,
            open_client(kind, proxy.url, a.gateway.admin_key) as client,
        ):
            rewarding = asyncio.create_task(client.session(a.session.id).reward(1.0))
            while not a.session.managed.rewards:
                await asyncio.sleep(0.001)
            await a.session.finalize()
            await rewarding
            assert a.session.managed.rewards == [{"score": 1.0}]

    run(test)


@both
def test_temporary_failures_are_repeated_and_lasting_ones_are_not(kind: str) -> None:
    ok = http_response(200, b'{"paused": false, "version": 4}')
    busy = http_response(429, b'{"error": {"message": "full", "code": "busy"}}', "Retry-After: 0")
    stopping = http_response(503, b'{"error": {"message": "stopping"}}', "Retry-After: 0")
    proxy = http_response(502, b"<html>bad gateway</html>", "Retry-After: 0")
    engine_failed = http_response(502, b'{"error": {"message": "vllm@h:1: cannot connect"}}')

    async def test() -> None:
        async with (
            fake_server(busy, stopping, proxy, ok) as url,
            open_client(kind, url, "k") as client,
        ):
            assert (await client.pause()).version == 4
        async with fake_server(engine_failed, ok) as url, open_client(kind, url, "k") as client:
            with pytest.raises(Exception, match="cannot connect"):
                await client.pause()
        async with (
            fake_server(proxy) as url,
            open_client(kind, url, "k", retry_timeout_s=0.0) as client,
        ):
            with pytest.raises(GatewayError, match=r"GET /engines: status 502: not a gateway's") as caught:
                await client.policy()
            assert caught.value.status == 502
        async with fake_server(http_response(200, b"<html>")) as url, open_client(kind, url) as client:
            with pytest.raises(GatewayError, match="not a gateway's response"):
                await client.health()

    run(test)


@both
def test_an_unreachable_gateway_is_reported_after_the_retry_timeout(kind: str) -> None:
    async def test() -> None:
        async with open_client(kind, "http://127.0.0.1:9", "k", retry_timeout_s=0.05) as client:
            with pytest.raises(GatewayError, match=r"GET /healthz: 127.0.0.1:9: cannot connect"):
                await client.health()
            with pytest.raises(GatewayError):
                await client.session("s").wait(timeout_s=0)

    run(test)


@both
def test_a_client_continues_after_a_restart_of_the_gateway(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        config = GatewayConfig(admin_key="ak-" + "a" * 30)
        async with agent("x", journal=tmp_path / "j", config=config) as a:
            port = int(a.gateway.url.rpartition(":")[2])
            client_context = open_client(kind, a.gateway.url, config.admin_key)
            client = await client_context.__aenter__()
            session = await client.open_session(id="s")
            await session.reward(0.5)

        async def start() -> Gateway:
            gateway = Gateway(
                engine=ScriptedEngine(), codec=ToyCodec(), journal=tmp_path / "j", config=config, port=port
            )
            await gateway.start()
            return gateway

        viewing = asyncio.create_task(session.view())
        gateway = await start()
        try:
            assert (await viewing).reward == 0.5
        finally:
            await client_context.__aexit__(None, None, None)
            await gateway.stop()

    run(test)


def test_keys_are_not_in_the_repr_and_invalid_urls_are_refused() -> None:
    session = AsyncClient("http://h:1", "secret").session("s", control_key="ck-1", api_key="sk-1")
    assert repr(session) == "<AsyncClientSession s>"
    with pytest.raises(InputError, match="url: got 'nowhere', expected http://HOST:PORT"):
        Client("nowhere", "k")


def test_a_closed_client_and_one_of_another_process_refuse_requests() -> None:
    with Client("http://127.0.0.1:9", "k") as client:
        pass
    client.close()
    with pytest.raises(InputError, match="request after close"):
        client.health()
    other = Client("http://127.0.0.1:9", "k")
    other._thread._process_id -= 1
    with pytest.raises(InputError, match="make a Client in each process"):
        other.health()


def test_ctrl_c_ends_a_wait_and_the_client_still_works() -> None:
    async def serve(ready: threading.Event, stop: threading.Event, found: list[Any]) -> None:
        async with agent("x") as a:
            found += [a.gateway.url, a.gateway.admin_key, a.session.id]
            ready.set()
            wait = a.gateway.sessions.wait_until_ended

            async def noted(*args: Any) -> None:
                waits.set()
                await wait(*args)

            a.gateway.sessions.wait_until_ended = noted  # type: ignore[assignment, method-assign]
            await asyncio.to_thread(stop.wait)

    def interrupt() -> None:
        assert waits.wait(HANG_S)
        os.kill(os.getpid(), signal.SIGINT)

    waits = threading.Event()
    ready, stop, found = threading.Event(), threading.Event(), []  # type: ignore[var-annotated]
    thread = threading.Thread(target=lambda: asyncio.run(serve(ready, stop, found)))
    thread.start()
    try:
        assert ready.wait(HANG_S)
        url, key, session_id = found
        with Client(url, key) as client:
            threading.Thread(target=interrupt).start()
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                client.session(session_id).wait(HANG_S)
            assert time.monotonic() - started < HANG_S / 2
            assert client.session(session_id).view().state == "open"
    finally:
        stop.set()
        thread.join()


def test_a_sync_client_serves_many_threads_at_once() -> None:
    async def test() -> None:
        async with agent("x") as a:
            with Client(a.gateway.url, a.gateway.admin_key) as client:
                loop = asyncio.get_running_loop()
                opened = await asyncio.gather(
                    *[loop.run_in_executor(CLIENT_THREADS, client.open_session) for _ in range(16)]
                )
                assert len({session.id for session in opened}) == 16

    run(test)
