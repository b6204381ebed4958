"""Rules decide where a call goes and whether it trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from branchline.core.errors import InputError
from branchline.engines.replicas import Replicas
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.engines.vllm import VllmEngine
from branchline.runtime.router import Router, RoutingRule
from tests.engines.fake_servers import FakeVllm
from tests.gateway.harness import agent, run

MODELS = {"/health": {}, "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}}


def test_the_first_rule_that_fits_decides() -> None:
    main, small = ScriptedEngine(name="main"), ScriptedEngine(name="small")
    fleet = Router(
        main,
        named_engines={"small": small},
        rules=[
            RoutingRule(agent="judge", train=False),
            RoutingRule(model="*haiku*", engine="small", train=False),
            RoutingRule("*"),
        ],
    )
    assert fleet.route("claude-haiku-4", "main").engine is small
    assert fleet.route("claude-haiku-4", "judge").engine is main
    assert not fleet.route("claude-haiku-4", "judge").train
    assert fleet.route("gpt-5", "").train


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("haiku", "expected model="),
        ("models=x", "expected model="),
        ("train=perhaps", "expected yes or no"),
    ],
)
def test_a_rule_that_cannot_be_read_says_what_is_expected(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        RoutingRule.parse(text)


def test_a_rule_for_an_engine_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="engine=big, expected one of the named ones: small"):
        Router(ScriptedEngine(), named_engines={"small": ScriptedEngine()}, rules=[RoutingRule(engine="big")])


def test_calls_that_do_not_train_stand_in_the_report() -> None:
    async def test() -> None:
        engine = ScriptedEngine(rule=replies("answer"))
        title = ScriptedEngine(engine.codec, replies("a title"), name="side")
        fleet = Router(
            engine, named_engines={"side": title}, rules=[RoutingRule("mini*", engine="side", train=False)]
        )
        async with agent(engine=engine, gateway_engine=fleet) as a:
            assert await a.ask_text("p") == "answer"
            assert await a.ask_text("name this", model="mini-1") == "a title"
            told = await a.get("/samples")
            assert len(told["samples"]) == 1
            assert [(drop["reason"], drop["tokens"]) for drop in told["report"]["dropped"]] == [
                ("untrained", len("a title") + 1)
            ]
            assert len(title.received_prompts) == 1

    run(test)


def test_replicas_come_and_go_while_a_session_goes_on() -> None:
    async def test() -> None:
        async with FakeVllm() as one, FakeVllm() as two:
            for server in (one, two):
                server.json_by_path = MODELS
            replicas = Replicas([VllmEngine(one.url)])
            fleet = Router(replicas, create_replica=VllmEngine)
            async with agent(gateway_engine=fleet, sampling={"max_tokens": 6}) as a:
                engines = f"{a.gateway.url}/engines"
                admin = {"authorization": f"Bearer {a.gateway.admin_key}"}
                await a.ask_text("p")
                last = await a.http.request(
                    "DELETE", engines, json={"name": replicas.engines[0].name}, headers=admin
                )
                assert last.status_code == 400
                assert "is the last one" in last.text
                added = await a.http.post(engines, json={"url": two.url}, headers=admin)
                assert added.status_code == 201
                assert [engine["in_flight"] for engine in added.json()["engines"]] == [0, 0]
                gone = await a.http.request(
                    "DELETE", engines, json={"name": replicas.engines[0].name}, headers=admin
                )
                assert len(gone.json()["engines"]) == 1
                await a.ask_text("p", "x", "go on")
                assert [len(server.bodies) for server in (one, two)] == [1, 1]
                refused = await a.http.post(engines, json={"url": "nowhere"}, headers=admin)
                assert refused.status_code == 400
                assert (await a.http.get(engines)).status_code == 401

    run(test)


def test_a_replica_is_used_once_its_weights_are_the_policys() -> None:
    async def test() -> None:
        async with FakeVllm() as one, FakeVllm() as same, FakeVllm() as untold:
            for server in (one, same, untold):
                server.json_by_path = MODELS
            fleet = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)
            async with agent(gateway_engine=fleet, sampling={"max_tokens": 3}) as a:
                engines = f"{a.gateway.url}/engines"
                admin = {"authorization": f"Bearer {a.gateway.admin_key}"}
                await fleet.pause()
                await fleet.resume(5)
                added = await a.http.post(engines, json={"url": untold.url}, headers=admin)
                assert [(e["version"], e["behind"]) for e in added.json()["engines"]] == [
                    (5, False),
                    (0, True),
                ]
                names = [engine["name"] for engine in added.json()["engines"]]
                last = await a.http.request("DELETE", engines, json={"name": names[0]}, headers=admin)
                assert (last.status_code, "is the last one in use" in last.text) == (400, True)
                added = await a.http.post(engines, json={"url": same.url, "version": 5}, headers=admin)
                assert [(e["version"], e["behind"]) for e in added.json()["engines"]] == [
                    (5, False),
                    (0, True),
                    (5, False),
                ]
                assert ("/update_weight_version", {"new_version": "5"}) in same.requests
                for _ in range(3):
                    told = replace(a, session=await a.gateway.session(sampling={"max_tokens": 3}))
                    await told.ask_text("p")
                    (line,) = await told.timelines()
                    assert line["versions"][-3:] == [5] * 3
                assert len(untold.bodies) == 0
                assert len(same.bodies) > 0
                gone = await a.http.request("DELETE", engines, json={"name": names[1]}, headers=admin)
                assert (gone.status_code, len(gone.json()["engines"])) == (200, 2)

    run(test)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"url": "http://h:1", "version": "5"}, "version: got '5', expected a whole number"),
        ({"url": "http://h:1", "version": True}, "version: got True, expected a whole number"),
        ({"url": "http://h:1", "verison": 5}, "field: got 'verison', expected only url, version"),
        (["http://h:1"], "body: got "),
    ],
)
def test_a_replica_that_is_not_well_described_is_not_added(body: Any, words: str) -> None:
    async def test() -> None:
        async with FakeVllm() as one:
            fleet = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)
            async with agent(gateway_engine=fleet) as a:
                admin = {"authorization": f"Bearer {a.gateway.admin_key}"}
                refused = await a.http.post(f"{a.gateway.url}/engines", json=body, headers=admin)
                assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True)
                assert len(fleet.describe_replicas()) == 1

    run(test)


def test_an_engine_in_this_process_takes_no_replicas() -> None:
    async def test() -> None:
        async with agent("x") as a:
            admin = {"authorization": f"Bearer {a.gateway.admin_key}"}
            refused = await a.http.post(f"{a.gateway.url}/engines", json={"url": "http://h:1"}, headers=admin)
            assert refused.status_code == 400
            assert "takes no replicas" in refused.text

    run(test)
