"""The policy is paused, gets new weights and goes on under a later version; who looks is told where it is."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from branchline.engines.replicas import Replicas
from branchline.engines.upstream_chat import UpstreamChat
from branchline.engines.vllm import VllmEngine
from branchline.runtime.router import Router
from tests.engines.fake_servers import FakeVllm
from tests.gateway.harness import Agent, agent, run


async def _policy(a: Agent, verb: str, body: Any = None) -> httpx.Response:
    admin = {"authorization": f"Bearer {a.gateway.admin_key}"}
    return await a.http.post(f"{a.gateway.url}/policy/{verb}", json=body, headers=admin)


async def _policy_state(a: Agent) -> list[tuple[bool, int]]:
    """What those who look are told: paused or not, and the version."""
    admin = {"authorization": f"Bearer {a.gateway.admin_key}"}
    answers = [await a.http.get(a.gateway.url + path, headers=admin) for path in ("/healthz", "/engines")]
    return [(answer.json()["paused"], answer.json()["version"]) for answer in answers]


def test_whoever_looks_is_told_whether_the_policy_is_paused() -> None:
    async def test() -> None:
        async with agent("x") as a:
            assert await _policy_state(a) == [(False, 0)] * 2
            assert (await _policy(a, "pause")).json() == {"paused": True, "version": 0}
            assert await _policy_state(a) == [(True, 0)] * 2
            assert (await _policy(a, "resume", {"version": 4})).json() == {"paused": False, "version": 4}
            assert await _policy_state(a) == [(False, 4)] * 2

    run(test)


def test_a_version_never_goes_back() -> None:
    async def test() -> None:
        async with agent("x") as a:
            await _policy(a, "resume", {"version": 5})
            await _policy(a, "pause")
            refused = await _policy(a, "resume", {"version": 3})
            assert refused.status_code == 400
            assert "version: got 3, expected 5, the version of now, or a later one" in refused.text
            assert await _policy_state(a) == [(True, 5)] * 2
            for body in ({"version": 5}, None, {"version": 6}):
                assert (await _policy(a, "resume", body)).status_code == 200
            assert await _policy_state(a) == [(False, 6)] * 2

    run(test)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"verison": 9}, "field: got 'verison', expected only version"),
        ([9], "body: got [9], expected an object"),
        (9, "body: got 9, expected an object"),
        ({"version": 1.0}, "version: got 1.0, expected a whole number"),
        ({"version": -1}, "version: got -1, expected a whole number"),
        ({"version": 2**31}, "version: got 2147483648, expected a whole number"),
    ],
)
def test_a_resume_that_cannot_be_read_leaves_the_policy_paused(body: Any, words: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            await _policy(a, "pause", {})
            refused = await _policy(a, "resume", body)
            assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True)
            assert await _policy_state(a) == [(True, 0)] * 2

    run(test)


def test_a_pause_takes_no_fields() -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await _policy(a, "pause", {"version": 3})
            assert (refused.status_code, "field: got 'version', expected none" in refused.text) == (400, True)
            assert await _policy_state(a) == [(False, 0)] * 2

    run(test)


@pytest.mark.parametrize("several", [False, True])
def test_after_a_resume_that_failed_calls_wait_for_the_one_that_succeeds(several: bool) -> None:
    async def test() -> None:
        async with FakeVllm() as server:
            engine = VllmEngine(server.url)
            async with agent(gateway_engine=Replicas([engine]) if several else engine) as a:
                await _policy(a, "pause")
                asking = asyncio.create_task(a.ask("p", max_tokens=3))
                server.failing_paths = {"/update_weight_version"}
                failed = await _policy(a, "resume", {"version": 2})
                assert (failed.status_code, "broken" in failed.text) == (502, True)
                assert await _policy_state(a) == [(True, 0)] * 2
                assert not server.bodies
                assert not asking.done()
                server.failing_paths = set()
                assert (await _policy(a, "resume", {"version": 2})).json() == {"paused": False, "version": 2}
                assert (await asking).status_code == 200
                (line,) = await a.timelines()
                assert line["versions"][-3:] == [2] * 3

    run(test)


def test_an_upstream_has_no_policy_to_pause_and_says_so() -> None:
    async def test() -> None:
        async with agent(gateway_engine=Router(UpstreamChat("http://127.0.0.1:1", name="far"))) as a:
            assert (await _policy(a, "pause")).json() == {"paused": False, "version": 0}
            assert (await _policy(a, "resume", {"version": 2})).json() == {"paused": False, "version": 0}

    run(test)
