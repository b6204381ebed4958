"""A gateway starts where it is told to, is reached by what it says, and stops whatever is going on."""

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
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from tests.gateway.harness import Agent, agent, run

LONG_DRAIN = GatewayConfig(drain_s=1000)
NO_DRAIN = GatewayConfig(drain_s=0)
SAID = "one two three four five six seven"


def _gateway(**options: Any) -> Gateway:
    return Gateway(engine=ScriptedEngine(ToyCodec()), codec=ToyCodec(), **options)


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0)


def _admin(gateway: Gateway) -> dict[str, str]:
    return {"authorization": f"Bearer {gateway.admin_key}"}


# -- stopping ----------------------------------------------------------------------------------------


def test_a_stop_answers_those_who_wait_for_a_session() -> None:
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
    """A streamed call of which the first words have come and the rest is held; what its client reads."""
    gate, begun = a.engine.gate, asyncio.Event()
    assert gate is not None

    async def read() -> str:
        heard = ""
        url, key = f"{a.session.base_url}/chat/completions", {"authorization": f"Bearer {a.session.api_key}"}
        body = {"messages": [{"role": "user", "content": "p"}], "stream": True}
        async with a.http.stream("POST", url, json=body, headers=key) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    heard += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                begun.set()
        return heard

    async def one_chunk() -> None:
        await _until(lambda: bool(a.engine.received_prompts))
        gate.set()
        await asyncio.sleep(0)
        gate.clear()

    reading = asyncio.create_task(read())
    await one_chunk()
    await begun.wait()
    return reading


def _held() -> ScriptedEngine:
    return ScriptedEngine(ToyCodec(), replies(SAID), gate=asyncio.Event())


@pytest.mark.parametrize("how", ["drained", "hurried"])
def test_a_call_that_does_not_end_is_broken_off_and_kept_as_far_as_it_came(how: str, tmp_path: Path) -> None:
    async def test() -> None:
        config = NO_DRAIN if how == "drained" else LONG_DRAIN
        async with agent(engine=_held(), config=config, journal=tmp_path / "j") as a:
            reading = await _half_streamed(a)
            stopping = asyncio.create_task(a.gateway.stop())
            if how == "hurried":
                await _until(lambda: a.gateway.sessions.stopping.is_set())
                assert not stopping.done()
                a.gateway.stop_now()
            await stopping
            with pytest.raises(httpx.RemoteProtocolError):
                await reading
            session_id = a.session.id
        async with _gateway(journal=tmp_path / "j") as again:
            tree = again.sessions.get(session_id).session.tree
            (call,) = tree.calls
            assert tree.delivery(call) == Delivery.CANCELLED
            text = tree.nodes[call.outputs[0]].message.content
            assert text
            assert SAID.startswith(text)
            assert text != SAID

    run(test)


def test_a_call_that_ends_in_time_is_answered_while_the_gateway_stops() -> None:
    async def test() -> None:
        async with agent(engine=_held(), config=LONG_DRAIN) as a:
            reading = await _half_streamed(a)
            stopping = asyncio.create_task(a.gateway.stop())
            await _until(lambda: a.gateway.sessions.stopping.is_set())
            assert a.engine.gate is not None
            a.engine.gate.set()
            assert await reading == SAID
            await stopping
            (call,) = a.session.managed.session.tree.calls
            assert a.session.managed.session.tree.delivery(call) == Delivery.DELIVERED

    run(test)


def test_a_policy_that_is_paused_does_not_hold_up_a_stop() -> None:
    async def test() -> None:
        async with agent("x", config=NO_DRAIN) as a:
            await a.gateway.app.router.pause()
            asking = asyncio.create_task(a.ask("p"))
            await _until(lambda: bool(a.engine.received_prompts))
            await a.gateway.stop()
            refused = await asking
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert not a.session.managed.session.tree.calls

    run(test)


def test_a_client_that_never_sends_its_body_does_not_hold_up_a_stop() -> None:
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


def test_signals_are_left_to_the_program() -> None:
    async def test() -> None:
        before = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)]
        async with _gateway():
            assert [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)] == before

    run(test)


def test_a_gateway_that_cannot_start_lets_go_of_its_journal(tmp_path: Path) -> None:
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
def test_the_addresses_it_hands_out_can_be_used(host: str, local: str) -> None:
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


def test_clients_are_told_the_address_they_came_by_or_the_public_one() -> None:
    async def test() -> None:
        async with httpx.AsyncClient() as http:
            for public, told in (("", "http://box:81"), ("https://bl.example/x/", "https://bl.example/x")):
                async with _gateway(host="0.0.0.0", config=GatewayConfig(public_url=public)) as gateway:
                    port = gateway._port
                    headers = {**_admin(gateway), "host": "box:81"}
                    opened = await http.post(f"http://127.0.0.1:{port}/sessions", headers=headers)
                    assert opened.json()["anthropic_base_url"].startswith(f"{told}/sessions/")
                    inside = (await gateway.session()).base_url
                    assert inside.startswith(f"{told if public else gateway.url}/sessions/")

    run(test)


def test_a_public_address_must_be_one() -> None:
    with pytest.raises(InputError, match="public_url: got 'box:81', expected http://HOST"):
        GatewayConfig(public_url="box:81")


# -- without keys ------------------------------------------------------------------------------------

OPEN = GatewayConfig(auth=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "box"])
def test_without_keys_nothing_but_loopback_is_listened_on(host: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected loopback"):
        _gateway(host=host, config=OPEN, journal=tmp_path / "j")
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
def test_without_keys_a_page_from_elsewhere_can_do_nothing(headers: dict[str, str], status: int) -> None:
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


def test_with_keys_it_does_not_matter_where_a_request_comes_from() -> None:
    async def test() -> None:
        async with agent("x") as a:
            headers = {"origin": "https://app.example", "host": "app.example"}
            assert (await a.ask("p", headers=headers)).status_code == 200

    run(test)


def test_behind_a_default_session_that_has_ended_comes_another(tmp_path: Path) -> None:
    async def test() -> None:
        async def call(gateway: Gateway) -> list[str]:
            body = {"messages": [{"role": "user", "content": "p"}]}
            answer = await http.post(f"{gateway.url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return [live.id for live in gateway.sessions if live.session.tree.calls and not live.is_closed]

        async with httpx.AsyncClient() as http:
            async with _gateway(config=OPEN, journal=tmp_path / "j") as gateway:
                assert await call(gateway) == ["default"]
                gateway.sessions.get("default").last_used -= 10**6
                await gateway.sessions.expire_idle(gateway.app.config.idle_s)
                assert await call(gateway) == ["default-2"]
                assert await call(gateway) == ["default-2"]
                await gateway.sessions.end_session(gateway.sessions.get("default-2"), "aborted")
            async with _gateway(config=OPEN, journal=tmp_path / "j") as again:
                again.sessions.evict(again.sessions.get("default"))
                assert await call(again) == ["default-3"]

    run(test)


# -- a session in a program --------------------------------------------------------------------------


def test_a_session_can_be_read_waited_for_and_completed_in_a_program() -> None:
    async def test() -> None:
        async with agent("A1", "A2") as a:
            assert await a.session.wait(0) == "open"
            await a.ask_text("p")
            waiting = asyncio.create_task(a.session.wait())
            assert len((await a.session.samples())["samples"]) == 1
            await a.session.complete("done")
            assert await waiting == "completed"
            assert a.session.managed.reason == "done"
            await a.ask_text("p", "A1", "q")
            assert (await a.session.finalize())["report"] == (await a.session.samples())["report"]
            assert await a.session.wait() == "finalized"

    run(test)


def test_many_generations_at_once_are_taken_unless_told_otherwise() -> None:
    assert GatewayConfig().max_in_flight >= 2048


def test_a_long_bare_prompt_is_encoded_beside_the_event_loop() -> None:
    async def test() -> None:
        threads: dict[int, bool] = {}

        class Watched(ToyCodec):
            def encode(self, text: str) -> Any:
                threads[len(text)] = threading.current_thread() is threading.main_thread()
                return super().encode(text)

        async with agent("x", "x", codec=Watched()) as a:
            for length in (10, 200_000):
                answer = await a.http.post(
                    f"{a.session.base_url}/completions",
                    json={"prompt": "y" * length},
                    headers={"authorization": f"Bearer {a.session.api_key}"},
                )
                assert answer.json()["usage"]["prompt_tokens"] == length
            assert threads == {10: True, 200_000: False}

    run(test)
