"""A gateway starts, hands out reachable URLs, and stops with calls in any state."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from branchline import ToyCodec
from branchline.core.call import Delivery
from branchline.core.errors import InputError
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.export.samples import export_samples
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from tests.gateway.harness import Agent, agent, run

LONG_DRAIN = GatewayConfig(drain_s=1000)
NO_DRAIN = GatewayConfig(drain_s=0)
REPLY = "one two three four five six seven"


def _gateway(**options: Any) -> Gateway:
    return Gateway(engine=ScriptedEngine(ToyCodec()), codec=ToyCodec(), **options)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def _admin(gateway: Gateway) -> dict[str, str]:
    return {"authorization": f"Bearer {gateway.admin_key}"}


# -- stopping ----------------------------------------------------------------------------------------


def test_stop_ends_waits_for_a_session() -> None:
    async def test() -> None:
        async with agent("x", config=LONG_DRAIN) as a:
            waiting = asyncio.create_task(a.get("/wait?timeout_s=3000"))
            inside = asyncio.create_task(a.session.wait())
            await _until(lambda: len(a.session.managed.ended_event._waiters) == 2)  # type: ignore[attr-defined]
            await a.gateway.stop()
            assert (await waiting)["state"] == "open"
            assert await inside == "open"

    run(test)


async def _half_streamed(a: Agent) -> asyncio.Task[str]:
    """A streamed call after its first chunk, with the engine held; the task returns the text received."""
    gate, begun = a.engine.gate, asyncio.Event()
    assert gate is not None

    async def read() -> str:
        text = ""
        url = f"{a.session.base_url}/chat/completions"
        body = {"messages": [{"role": "user", "content": "p"}], "stream": True}
        async with a.http.stream("POST", url, json=body, headers=a.api_headers) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                begun.set()
        return text

    async def one_chunk() -> None:
        await _until(lambda: bool(a.engine.received_prompts))
        gate.set()
        await asyncio.sleep(0)
        gate.clear()

    received = asyncio.create_task(read())
    await one_chunk()
    await begun.wait()
    return received


def _held_engine() -> ScriptedEngine:
    return ScriptedEngine(ToyCodec(), replies(REPLY), gate=asyncio.Event())


@pytest.mark.parametrize("how", ["drain_s", "skip_drain"])
def test_call_that_exceeds_the_drain_time_is_recorded_as_cancelled(how: str, tmp_path: Path) -> None:
    async def test() -> None:
        config = NO_DRAIN if how == "drain_s" else LONG_DRAIN
        async with agent(engine=_held_engine(), config=config, journal=tmp_path / "j") as a:
            received = await _half_streamed(a)
            stopping = asyncio.create_task(a.gateway.stop())
            if how == "skip_drain":
                await _until(lambda: a.gateway.sessions.stopping.is_set())
                assert not stopping.done()
                a.gateway.skip_drain()
            await stopping
            with pytest.raises(httpx.RemoteProtocolError):
                await received
            session_id = a.session.id
        async with _gateway(journal=tmp_path / "j") as again:
            tree = again.sessions.get(session_id).session.tree
            (call,) = tree.calls
            assert tree.delivery(call) == Delivery.CANCELLED
            text = tree.nodes[call.outputs[0]].message.content
            assert text
            assert REPLY.startswith(text)
            assert text != REPLY

    run(test)


def test_call_that_ends_within_the_drain_time_is_delivered() -> None:
    async def test() -> None:
        async with agent(engine=_held_engine(), config=LONG_DRAIN) as a:
            received = await _half_streamed(a)
            stopping = asyncio.create_task(a.gateway.stop())
            await _until(lambda: a.gateway.sessions.stopping.is_set())
            assert a.engine.gate is not None
            a.engine.gate.set()
            assert await received == REPLY
            await stopping
            (call,) = a.session.managed.session.tree.calls
            assert a.session.managed.session.tree.delivery(call) == Delivery.DELIVERED

    run(test)


def test_paused_policy_does_not_block_a_stop() -> None:
    async def test() -> None:
        async with agent("x", config=NO_DRAIN) as a:
            await a.gateway.app.router.pause()
            answer = asyncio.create_task(a.ask("p"))
            await _until(lambda: bool(a.engine.received_prompts))
            await a.gateway.stop()
            refused = await answer
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert not a.session.managed.session.tree.calls

    run(test)


def test_unfinished_request_body_does_not_block_a_stop() -> None:
    async def test() -> None:
        async with agent("x", config=NO_DRAIN) as a:
            host, _, port = a.gateway.url.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /sessions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n")
            writer.write(f"authorization: Bearer {a.gateway.admin_key}\r\n\r\n{{".encode())
            await _until(lambda: bool(a.gateway.app._request_tasks))
            await a.gateway.stop()
            assert (await reader.readline()).split()[1] == b"503"
            writer.close()

    run(test)


def test_stopping_twice_is_fine() -> None:
    async def test() -> None:
        async with _gateway() as gateway:
            await gateway.stop()

    run(test)


def test_gateway_installs_no_signal_handlers() -> None:
    async def test() -> None:
        before = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)]
        async with _gateway():
            assert [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)] == before

    run(test)


def test_gateway_that_cannot_start_closes_its_journal(tmp_path: Path) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
            await _gateway(journal=tmp_path / "j", port=taken.getsockname()[1]).start()
        async with _gateway(journal=tmp_path / "j"):
            pass

    run(test)


# -- addresses ---------------------------------------------------------------------------------------


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("localhost", "http://localhost:"),
        ("0.0.0.0", "http://127.0.0.1:"),
        pytest.param("::1", "http://[::1]:", marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6")),
        pytest.param("::", "http://[::1]:", marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6")),
    ],
)
def test_urls_of_sessions_are_reachable(host: str, local: str) -> None:
    async def test() -> None:
        async with _gateway(host=host) as gateway, httpx.AsyncClient() as http:
            assert gateway.url.startswith(local)
            assert (await gateway.session()).base_url.startswith(f"{gateway.url}/sessions/")
            opened = (await http.post(f"{gateway.url}/sessions", headers=_admin(gateway))).json()
            assert opened["base_url"] == f"{gateway.url}/sessions/{opened['id']}/v1"
            answer = await http.post(
                f"{opened['base_url']}/chat/completions",
                json={"messages": [{"role": "user", "content": "p"}]},
                headers={"authorization": f"Bearer {opened['api_key']}"},
            )
            assert answer.status_code == 200

    run(test)


def test_session_urls_have_the_requests_host_or_the_public_url() -> None:
    async def test() -> None:
        async with httpx.AsyncClient() as http:
            for public, expected in (
                ("", "http://box:81"),
                ("https://bl.example/x/", "https://bl.example/x"),
            ):
                async with _gateway(host="0.0.0.0", config=GatewayConfig(public_url=public)) as gateway:
                    port = gateway._port
                    headers = {**_admin(gateway), "host": "box:81"}
                    opened = await http.post(f"http://127.0.0.1:{port}/sessions", headers=headers)
                    assert opened.json()["anthropic_base_url"].startswith(f"{expected}/sessions/")
                    inside = (await gateway.session()).base_url
                    assert inside.startswith(f"{expected if public else gateway.url}/sessions/")

    run(test)


def test_public_url_must_be_a_url() -> None:
    with pytest.raises(InputError, match="public_url: got 'box:81', expected http://HOST"):
        GatewayConfig(public_url="box:81")


# -- without keys ------------------------------------------------------------------------------------

NO_AUTH = GatewayConfig(auth=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "box"])
def test_without_keys_only_loopback_is_allowed(host: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected loopback"):
        _gateway(host=host, config=NO_AUTH, journal=tmp_path / "j")
    assert not (tmp_path / "j").exists()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "[::1"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]:1"}, 200),
        ({"host": "bl.example"}, 200),
        ({}, 200),
    ],
)
def test_without_keys_other_origins_are_refused(headers: dict[str, str], status: int) -> None:
    async def test() -> None:
        config = GatewayConfig(auth=False, public_url="https://bl.example")
        async with agent("x", config=config) as a:
            url = f"http://127.0.0.1:{a.gateway._port}"
            paused = await a.http.post(f"{url}/policy/pause", content=b"{}", headers=headers)
            await a.gateway.app.router.resume()
            body = {"messages": [{"role": "user", "content": "p"}]}
            answered = await a.http.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            assert (paused.status_code, answered.status_code) == (status, status)
            if status == 403:
                assert paused.json()["error"]["type"] == "permission_error"
                assert not a.engine.received_prompts

    run(test)


def test_with_keys_any_origin_is_accepted() -> None:
    async def test() -> None:
        async with agent("x") as a:
            headers = {"origin": "https://app.example", "host": "app.example"}
            assert (await a.ask("p", headers=headers)).status_code == 200

    run(test)


def test_new_default_session_follows_an_ended_one(tmp_path: Path) -> None:
    async def test() -> None:
        async def call(gateway: Gateway) -> list[str]:
            body = {"messages": [{"role": "user", "content": "p"}]}
            answer = await http.post(f"{gateway.url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return [one.id for one in gateway.sessions if one.session.tree.calls and not one.is_closed]

        async with httpx.AsyncClient() as http:
            async with _gateway(config=NO_AUTH, journal=tmp_path / "j") as gateway:
                assert await call(gateway) == ["default"]
                gateway.sessions.get("default").last_used -= 10**6
                await gateway.sessions.expire_idle(gateway.app.config.idle_s)
                assert await call(gateway) == ["default-2"]
                assert await call(gateway) == ["default-2"]
                await gateway.sessions.end_session(gateway.sessions.get("default-2"), "aborted")
            async with _gateway(config=NO_AUTH, journal=tmp_path / "j") as again:
                again.sessions.evict(again.sessions.get("default"))
                assert await call(again) == ["default-3"]

    run(test)


# -- a session in a program --------------------------------------------------------------------------


def test_session_of_a_program_is_exported_waited_for_and_completed() -> None:
    async def test() -> None:
        async with agent("A1", "A2") as a:
            assert await a.session.wait(0) == "open"
            await a.ask_text("p")
            waiting = asyncio.create_task(a.session.wait())
            assert len((await a.session.export()).samples) == 1
            await a.session.complete("done")
            assert await waiting == "completed"
            assert a.session.managed.reason == "done"
            await a.ask_text("p", "A1", "q")
            export = await a.session.finalize()
            samples = export_samples(a.session.managed.session.tree, session=a.session.id).samples
            assert [one.response_ids.tolist() for one in export.samples] == [
                one.response_ids.tolist() for one in samples
            ]
            assert export.report == (await a.session.export()).report
            assert await a.session.wait() == "finalized"

    run(test)


def test_default_max_in_flight() -> None:
    assert GatewayConfig().max_in_flight >= 2048


def test_long_raw_prompt_is_encoded_in_a_thread() -> None:
    async def test() -> None:
        threads: dict[int, bool] = {}

        class RecordingCodec(ToyCodec):
            def encode(self, text: str) -> Any:
                threads[len(text)] = threading.current_thread() is threading.main_thread()
                return super().encode(text)

        async with agent("x", "x", codec=RecordingCodec()) as a:
            for length in (10, 200_000):
                answer = await a.http.post(
                    f"{a.session.base_url}/completions",
                    json={"prompt": "y" * length},
                    headers={"authorization": f"Bearer {a.session.api_key}"},
                )
                assert answer.json()["usage"]["prompt_tokens"] == length
            assert threads == {10: True, 200_000: False}

    run(test)
