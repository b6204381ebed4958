"""Requests of the control API that are sent twice with one idempotency key have one effect."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from branchline import ToyCodec
from branchline.engines.replicas import Replicas
from branchline.engines.scripted import ScriptedEngine
from branchline.engines.vllm import VllmEngine
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from branchline.runtime.router import Router
from branchline.tree.journal import Journal
from tests.engines.fake_servers import FakeVllm
from tests.gateway.harness import Agent, agent, run

KEY = "0123456789abcdef0123456789abcdef"


async def post(a: Agent, path: str, body: Any, key: str = KEY, method: str = "POST") -> httpx.Response:
    headers = {**a.admin_headers, "idempotency-key": key}
    return await a.http.request(method, a.gateway.url + path, json=body, headers=headers)


def test_a_session_opened_twice_with_one_key_is_one_session_with_the_same_keys() -> None:
    async def test() -> None:
        async with agent() as a:
            one, two = [await post(a, "/sessions", {"group": "g"}) for _ in range(2)]
            assert one.status_code == two.status_code == 201
            assert one.json() == two.json()
            assert len(a.gateway.sessions) == 2  # the other is the harness's own
            other = await post(a, "/sessions", {"group": "g"}, KEY + "x")
            assert other.json()["id"] != one.json()["id"]
            assert other.json()["api_key"] != one.json()["api_key"]
            for headers in ({"x-api-key": one.json()["api_key"]}, {"x-api-key": one.json()["control_key"]}):
                shown = await a.http.get(one.json()["base_url"] + "/models", headers=headers)
                assert shown.status_code == 200

    run(test)


def test_a_repeat_finds_its_session_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        config = GatewayConfig(admin_key="ak-" + "a" * 30, public_url="http://gateway")
        opened = []
        for _ in range(2):
            gateway = Gateway(
                engine=ScriptedEngine(), codec=ToyCodec(), journal=tmp_path / "j", config=config
            )
            transport = httpx.ASGITransport(gateway.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
                response = await http.post(
                    "/sessions",
                    json={"id": "s1"},
                    headers={"x-api-key": config.admin_key, "idempotency-key": KEY},
                )
            opened.append(response.json())
            await gateway.stop()
        assert opened[0] == opened[1]
        assert opened[0]["id"] == "s1"

    run(test)


def test_the_same_key_does_not_open_a_session_with_other_options() -> None:
    async def test() -> None:
        async with agent() as a:
            assert (await post(a, "/sessions", {"id": "s1", "group": "g"})).status_code == 201
            for body in ({"id": "s1", "group": "h"}, {"id": "s1"}):
                refused = await post(a, "/sessions", body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (409, "exists")
            refused = await post(a, "/sessions", {"id": "s1", "group": "g"}, KEY + "x")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "exists")

    run(test)


def test_session_keys_do_not_follow_from_the_idempotency_key_alone() -> None:
    async def test() -> None:
        keys = []
        for admin_key in ("ak-" + "a" * 30, "ak-" + "b" * 30):
            async with agent(config=GatewayConfig(admin_key=admin_key)) as a:
                opened = (await post(a, "/sessions", {"id": "s1"})).json()
                keys += [opened["api_key"], opened["control_key"]]
                second = (await post(a, "/sessions", {"id": "s2"})).json()
                keys += [second["api_key"], second["control_key"]]
        assert len(set(keys)) == len(keys)

    run(test)


@pytest.mark.parametrize("key", ["short", "x" * 256])
def test_an_idempotency_key_of_another_length_is_refused(key: str) -> None:
    async def test() -> None:
        async with agent() as a:
            for path, body in (("/sessions", {}), (f"/sessions/{a.session.id}/reward", 1.0)):
                refused = await post(a, path, body, key)
                assert refused.status_code == 400
                assert "idempotency-key: got" in refused.json()["error"]["message"]

    run(test)


def test_a_reward_sent_twice_with_one_key_is_added_once() -> None:
    async def test() -> None:
        async with agent("x") as a:
            await a.ask_text("p")
            path = f"/sessions/{a.session.id}/reward"
            for _ in range(2):
                assert (await post(a, path, {"score": 1.0, "turn": 1})).status_code == 200
            assert a.session.managed.rewards == [{"score": 1.0, "turn": 1, "turn_node": 2}]
            # Another request is another reward, also if it is equal.
            await post(a, path, {"score": 1.0, "turn": 1}, KEY + "x")
            assert len(a.session.managed.rewards) == 2

    run(test)


def test_concurrent_repeats_of_a_reward_add_it_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent("x", journal=tmp_path / "j") as a:
            path = f"/sessions/{a.session.id}/reward"
            await asyncio.gather(
                *[post(a, path, [{"score": 0.5}, {"score": 1.0, "extras": {"note": "b"}}]) for _ in range(8)]
            )
            assert a.session.managed.rewards == [{"score": 0.5}, {"score": 1.0, "extras": {"note": "b"}}]

    run(test)


def test_the_rest_of_a_list_is_added_if_the_journal_failed_in_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with agent("x", journal=tmp_path / "j") as a:
            managed, append = a.session.managed, Journal.append
            count = 0

            def fail_second(journal: Journal, *args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == 2:
                    raise OSError("disk full")
                return append(journal, *args, **kwargs)

            monkeypatch.setattr(Journal, "append", fail_second)
            path = f"/sessions/{a.session.id}/reward"
            rewards = [{"score": score} for score in (1.0, 2.0, 3.0)]
            assert (await post(a, path, rewards)).status_code == 500
            assert managed.rewards == [{"score": 1.0}]
            assert (await post(a, path, rewards)).status_code == 200
            assert managed.rewards == rewards

    run(test)


def test_a_reward_is_known_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        for _ in range(2):
            async with agent("x", journal=tmp_path / "j") as a:
                if "s" not in {managed.id for managed in a.gateway.sessions}:
                    await a.gateway.session(id="s")
                assert (await post(a, "/sessions/s/reward", 1.0)).status_code == 200
                assert a.gateway.sessions.get("s").rewards == [{"score": 1.0}]

    run(test)


def test_an_engine_is_added_once_and_removed_once() -> None:
    async def test() -> None:
        async with FakeVllm() as one, FakeVllm() as two:
            for server in (one, two):
                server.json_by_path = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}
            router = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)
            async with agent(gateway_engine=router) as a:
                added = await asyncio.gather(*[post(a, "/engines", {"url": two.url}) for _ in range(3)])
                assert [response.status_code for response in added] == [201] * 3
                name = added[0].json()["engines"][1]["name"]
                again = await post(a, "/engines", {"url": two.url}, KEY + "x")
                assert (again.status_code, "in use already" in again.text) == (400, True)
                for _ in range(2):
                    removed = await post(a, "/engines", {"name": name}, KEY + "y", "DELETE")
                    assert (removed.status_code, len(removed.json()["engines"])) == (200, 1)

    run(test)


def test_a_failed_engine_request_is_tried_again_with_its_key() -> None:
    async def test() -> None:
        async with FakeVllm() as one, FakeVllm() as two:
            one.json_by_path = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}
            router = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)
            async with agent(gateway_engine=router) as a:
                two.json_by_path = {}
                assert (await post(a, "/engines", {"url": two.url})).status_code == 502
                two.json_by_path = one.json_by_path
                assert (await post(a, "/engines", {"url": two.url})).status_code == 201

    run(test)
