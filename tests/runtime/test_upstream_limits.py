"""What a client, a session and its limits allow is kept where an upstream answers, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from branchline import ToyCodec
from branchline.engines.upstream_chat import UpstreamChat
from branchline.gateway.config import GatewayConfig
from tests.engines.fake_servers import FakeChat
from tests.engines.test_upstream_chat import chat_event
from tests.gateway.harness import Agent, agent, run
from tests.gateway.protocols.protocol_bodies import post

ANSWER = "fine"
TOKENS = len(ToyCodec.chatml().encode(ANSWER)) + 1
"""What it counts for, with its end."""


@asynccontextmanager
async def _upstream_session(**options: Any) -> AsyncIterator[tuple[Agent, FakeChat]]:
    async with FakeChat() as server:
        server.scripted_events = (chat_event(content=ANSWER), chat_event("stop"))
        async with agent(
            gateway_engine=UpstreamChat(server.url + "/v1"), codec=ToyCodec.chatml(), **options
        ) as a:
            yield a, server


def _limit_fields(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in ("max_tokens", "max_completion_tokens") if name in body}


@pytest.mark.parametrize(
    ("options", "header", "body", "told"),
    [
        ({"sampling": {"max_tokens": 500}}, "10", {"max_tokens": 10}, {"max_tokens": 10}),
        ({"sampling": {"max_tokens": 500}}, "10", {"max_completion_tokens": 10}, {"max_tokens": 10}),
        ({"sampling": {"max_tokens": 5}}, "10", {"max_tokens": 10}, {"max_tokens": 5}),
        ({}, "10", {"max_completion_tokens": 30}, {"max_completion_tokens": 10}),
        ({}, "10", {}, {"max_tokens": 10}),
        ({"limits": {"tokens": 7}}, "", {}, {"max_tokens": 7}),
        ({"limits": {"tokens": 7}}, "", {"max_completion_tokens": 9}, {"max_completion_tokens": 7}),
        ({"limits": {"tokens": 70}}, "", {"max_tokens": 9}, {"max_tokens": 9}),
        ({"limits": {"tokens": 10**6}}, "", {}, {"max_tokens": 4096}),
        ({"config": GatewayConfig(default_max_tokens=8)}, "", {}, {"max_tokens": 8}),
        ({}, "", {}, {}),
    ],
)
def test_an_upstream_is_told_the_least_of_all_limits(
    options: dict[str, Any], header: str, body: dict[str, Any], told: dict[str, int]
) -> None:
    async def test() -> None:
        async with _upstream_session(**options) as (a, server):
            await a.ask_text("p", headers={"x-branchline-max-tokens": header} if header else {}, **body)
            assert _limit_fields(server.bodies[0]) == told

    run(test)


@pytest.mark.parametrize(
    ("protocol", "name"), [("messages", "max_tokens"), ("responses", "max_output_tokens")]
)
def test_the_limit_of_another_protocol_is_one_too(protocol: str, name: str) -> None:
    async def test() -> None:
        async with _upstream_session(limits={"tokens": 2 * TOKENS}) as (a, server):
            for _ in range(2):
                assert (await post(a, protocol, "q", **{name: 9})).status_code == 200
            assert [_limit_fields(body) for body in server.bodies] == [
                {"max_tokens": 9},
                {"max_tokens": TOKENS},
            ]

    run(test)


@pytest.mark.parametrize(
    ("limits", "code"), [({"calls": 1}, "out_of_calls"), ({"tokens": TOKENS}, "out_of_tokens")]
)
def test_a_session_that_has_used_what_it_may_asks_an_upstream_no_more(
    limits: dict[str, int], code: str
) -> None:
    async def test() -> None:
        async with _upstream_session(limits=limits) as (a, server):
            await a.ask_text("p")
            refused = await a.ask("p")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, code)
            assert len(server.bodies) == 1

    run(test)


def test_calls_beside_each_other_share_what_is_left() -> None:
    async def test() -> None:
        async with _upstream_session(limits={"tokens": 12, "calls": 3}) as (a, server):
            server.hold_after = 0
            first = asyncio.create_task(a.ask("p", max_tokens=9))
            await server.is_held.wait()
            second = asyncio.create_task(a.ask("p", max_tokens=9))
            while len(server.bodies) < 2:
                await asyncio.sleep(0)
            assert (await a.ask("p")).status_code == 429
            assert (a.session.managed.in_flight, a.session.managed.reserved_tokens) == (2, 12)
            server.proceed.set()
            assert [(await task).status_code for task in (first, second)] == [200, 200]
            assert [_limit_fields(body) for body in server.bodies] == [{"max_tokens": 9}, {"max_tokens": 3}]
            assert (a.session.managed.in_flight, a.session.managed.reserved_tokens) == (0, 0)

    run(test)


def test_a_call_that_an_upstream_refuses_gives_back_what_it_had_reserved() -> None:
    async def test() -> None:
        async with _upstream_session(limits={"tokens": 12, "calls": 1}) as (a, server):
            server.refusal = (500, b"down")
            assert (await a.ask("p")).status_code == 502
            server.refusal = None
            assert await a.ask_text("p") == ANSWER

    run(test)
