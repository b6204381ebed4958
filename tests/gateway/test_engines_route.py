"""`/engines` over HTTP: replicas are added and removed by an admin; wrong bodies are refused."""

from __future__ import annotations

from typing import Any

import pytest

from branchline.engines.replicas import Replicas
from branchline.engines.vllm import VllmEngine
from branchline.runtime.router import Router
from tests.engines.fake_servers import FakeVllm
from tests.gateway.harness import agent, run

SERVER_INFO = {"/health": {}, "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}}


def test_an_admin_adds_and_removes_replicas() -> None:
    async def test() -> None:
        async with FakeVllm() as one, FakeVllm() as two:
            for server in (one, two):
                server.json_by_path = SERVER_INFO
            router = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)
            async with agent(gateway_engine=router) as a:
                url, admin = f"{a.gateway.url}/engines", {"authorization": f"Bearer {a.gateway.admin_key}"}
                first = {"name": router.describe_replicas()[0]["name"]}
                refused = await a.http.request("DELETE", url, json=first, headers=admin)
                assert (refused.status_code, "is the last one" in refused.text) == (400, True)
                added = await a.http.post(url, json={"url": two.url}, headers=admin)
                assert (added.status_code, len(added.json()["engines"])) == (201, 2)
                removed = await a.http.request("DELETE", url, json=first, headers=admin)
                assert (removed.status_code, len(removed.json()["engines"])) == (200, 1)
                assert (await a.http.get(url)).status_code == 401

    run(test)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"url": "nowhere"}, "nowhere"),
        ({"url": "http://h:1", "version": "5"}, "version: got '5', expected a whole number"),
        ({"url": "http://h:1", "version": True}, "version: got True, expected a whole number"),
        ({"url": "http://h:1", "verison": 5}, "field: got 'verison', expected only url, version"),
        (["http://h:1"], "body: got "),
    ],
)
def test_a_wrong_body_adds_no_replica(body: Any, message: str) -> None:
    async def test() -> None:
        async with FakeVllm() as server:
            router = Router(Replicas([VllmEngine(server.url)]), create_replica=VllmEngine)
            async with agent(gateway_engine=router) as a:
                admin = {"authorization": f"Bearer {a.gateway.admin_key}"}
                refused = await a.http.post(f"{a.gateway.url}/engines", json=body, headers=admin)
                assert (refused.status_code, message in refused.json()["error"]["message"]) == (400, True)
                assert len(router.describe_replicas()) == 1

    run(test)
