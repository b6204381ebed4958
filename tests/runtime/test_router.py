"""Rules decide which engine a call goes to and whether it is trained; replicas are added and removed.

Policy version, pause and replicas survive a restart.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.chat.toy import ToyCodec
from branchline.core.errors import EngineError, InputError, MessageError
from branchline.engines.replicas import Replicas
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.engines.upstream_chat import UpstreamChat
from branchline.engines.vllm import VllmEngine
from branchline.runtime.router import Router
from branchline.runtime.routing_rule import RoutingRule
from branchline.tree.journal import Journal
from tests.engines.fake_servers import FakeVllm
from tests.gateway.harness import agent, run
from tests.runtime.harness import complete_call, open_session

SERVER_INFO = {"/health": {}, "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}}


def test_the_first_rule_that_matches_decides() -> None:
    main, small = ScriptedEngine(name="main"), ScriptedEngine(name="small")
    router = Router(
        main,
        named_engines={"small": small},
        rules=[
            RoutingRule(agent="judge", train=False),
            RoutingRule(model="*haiku*", engine="small", train=False),
            RoutingRule("*"),
        ],
    )
    assert router.engine_names == ["main", "small"]
    assert router.route("claude-haiku-4", "main").engine is small
    assert router.route("claude-haiku-4", "judge").engine is main
    assert not router.route("claude-haiku-4", "judge").train
    assert router.route("gpt-5", "").train


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("haiku", "expected model="),
        ("models=x", "expected model="),
        ("train=perhaps", "expected yes or no"),
    ],
)
def test_an_invalid_rule_is_refused_with_what_is_expected(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        RoutingRule.parse(text)


def test_a_rule_for_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InputError, match="engine=big, expected one of the named ones: small"):
        Router(ScriptedEngine(), named_engines={"small": ScriptedEngine()}, rules=[RoutingRule(engine="big")])


def test_calls_that_are_not_trained_are_in_the_report() -> None:
    async def test() -> None:
        engine = ScriptedEngine(rule=replies("answer"))
        title = ScriptedEngine(engine.codec, replies("a title"), name="side")
        rules = [RoutingRule("mini*", engine="side", train=False)]
        router = Router(engine, named_engines={"side": title}, rules=rules)
        async with agent(engine=engine, gateway_engine=router) as a:
            assert await a.ask_text("p") == "answer"
            assert await a.ask_text("name this", model="mini-1") == "a title"
            exported = await a.get("/samples")
            assert len(exported["samples"]) == 1
            assert [(drop["reason"], drop["tokens"]) for drop in exported["report"]["dropped"]] == [
                ("untrained", len("a title") + 1)
            ]
            assert len(title.received_prompts) == 1

    run(test)


def test_the_default_engine_is_paused_and_its_version_only_grows() -> None:
    async def test() -> None:
        router = Router(ScriptedEngine(version=3))
        await router.pause()
        assert router.paused
        with pytest.raises(MessageError, match="version: got 2, expected 3"):
            await router.resume(2)
        assert router.paused
        await router.resume(4)
        assert (router.paused, router.version) == (False, 4)

    run(test)


def test_an_upstream_has_no_weights_to_update() -> None:
    async def test() -> None:
        router = Router(UpstreamChat("http://127.0.0.1:1"))
        assert isinstance(router.route("m", "").engine, UpstreamChat)
        await router.pause()
        await router.resume(2)
        assert (router.paused, router.version) == (False, 0)
        await router.close()

    run(test)


# -- replicas ----------------------------------------------------------------------------------------


def test_replicas_are_added_and_removed_while_a_session_continues() -> None:
    async def test() -> None:
        async with FakeVllm() as one, FakeVllm() as two:
            for server in (one, two):
                server.json_by_path = SERVER_INFO
            router = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)
            managed = open_session(ToyCodec())
            engine = router.default_engine
            assert isinstance(engine, Replicas)
            await complete_call(managed, engine)
            first = engine.engines[0].name
            with pytest.raises(InputError, match="is the last one in use"):
                await router.remove_replica(first)
            await router.add_replica(two.url)
            assert [replica["in_flight"] for replica in router.describe_replicas()] == [0, 0]
            await router.remove_replica(first)
            assert len(router.describe_replicas()) == 1
            await complete_call(managed, engine)
            assert [len(server.bodies) for server in (one, two)] == [1, 1]
            with pytest.raises(InputError, match="nowhere"):
                await router.add_replica("nowhere")
            await router.close()

    run(test)


def test_a_replica_is_used_when_it_has_the_weights_of_the_policy() -> None:
    async def test() -> None:
        async with FakeVllm() as one, FakeVllm() as same, FakeVllm() as unknown:
            for server in (one, same, unknown):
                server.json_by_path = SERVER_INFO
            router = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)

            def versions() -> list[tuple[int, bool]]:
                return [(replica["version"], replica["behind"]) for replica in router.describe_replicas()]

            await router.pause()
            await router.resume(5)
            await router.add_replica(unknown.url)
            assert versions() == [(5, False), (0, True)]
            names = [replica["name"] for replica in router.describe_replicas()]
            with pytest.raises(InputError, match="is the last one in use"):
                await router.remove_replica(names[0])
            await router.add_replica(same.url, 5)
            assert versions() == [(5, False), (0, True), (5, False)]
            assert ("/update_weight_version", {"new_version": "5"}) in same.requests
            async with agent(gateway_engine=router) as a:
                for _ in range(3):
                    client = replace(a, session=await a.gateway.session(sampling={"max_tokens": 3}))
                    await client.ask_text("p")
                    (timeline,) = await client.timelines()
                    assert timeline["versions"][-3:] == [5] * 3
                assert len(unknown.bodies) == 0
                assert len(same.bodies) > 0
                await router.remove_replica(names[1])
                assert len(router.describe_replicas()) == 2

    run(test)


def test_an_engine_in_this_process_takes_no_replicas() -> None:
    async def test() -> None:
        router = Router(ScriptedEngine(name="here"))
        assert router.describe_replicas() == [{"name": "here", "version": 0}]
        with pytest.raises(InputError, match="here takes no replicas"):
            await router.add_replica("http://h:1")
        with pytest.raises(InputError, match="here takes no replicas"):
            await router.remove_replica("here")

    run(test)


# -- restarts ----------------------------------------------------------------------------------------


def test_version_and_pause_survive_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent("one", "two", journal=tmp_path / "j", id="s") as a:
            router = a.gateway.app.router
            await a.ask_text("p")
            await router.pause()
            await router.resume(7)
            await a.ask_text("p", "one", "q")
            await router.pause()
        async with agent(journal=tmp_path / "j", rule=lambda _: "three") as b:
            router = b.gateway.app.router
            assert (router.paused, router.version) == (True, 7)
            asked = asyncio.create_task(b.ask_text("p", "one", "q", "two", "r"))
            await asyncio.sleep(0.05)
            assert not asked.done()
            refused = await b.http.post(
                f"{b.gateway.url}/policy/resume", json={"version": 5}, headers=b.admin_headers
            )
            assert refused.status_code == 400
            assert "version: got 5, expected 7" in refused.text
            await router.resume()
            assert await asked == "three"
            (timeline,) = await b.timelines()
            assert timeline["versions"][-1] == 7

    run(test)


def test_a_journal_without_records_of_the_policy_continues_at_the_version_of_its_tokens(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec(), replies("one"), version=4)
        async with agent(engine=engine, journal=tmp_path / "j") as a:
            await a.ask_text("p")
        async with agent(journal=tmp_path / "j") as b:
            assert b.gateway.app.router.version == 4

    run(test)


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["pause", "resume", "update", "fail", "restart"]), max_size=12))
def test_versions_only_grow_over_any_updates_failures_and_restarts(steps: list[str]) -> None:
    class FailingEngine(ScriptedEngine):
        fails = False

        async def resume(self, version: int | None = None) -> None:
            if self.fails:
                raise EngineError("no weights")
            await super().resume(version)

    async def test() -> None:
        with tempfile.TemporaryDirectory() as folder:
            highest, paused = 0, False
            with Journal(Path(folder) / "j") as journal:
                router = Router(FailingEngine())
                await router.restore(journal)
                for step in steps:
                    if step == "restart":
                        router = Router(FailingEngine())
                        await router.restore(journal)
                    elif step == "pause":
                        await router.pause()
                        paused = True
                    elif step == "fail":
                        router.default_engine.fails = True  # type: ignore[union-attr]
                        with pytest.raises(EngineError):
                            await router.resume(highest + 1)
                        router.default_engine.fails = False  # type: ignore[union-attr]
                    else:
                        highest += step == "update"
                        await router.resume(highest if step == "update" else None)
                        paused = False
                    assert (router.version, router.paused) == (highest, paused)
                    if highest:
                        with pytest.raises(MessageError, match=f"got {highest - 1}, expected {highest}"):
                            await router.resume(highest - 1)

    run(test)


def test_a_kill_during_an_update_restarts_paused_at_the_new_version(tmp_path: Path) -> None:
    """The record of the version is written before the engine samples under it."""

    class KilledEngine(ScriptedEngine):
        async def resume(self, version: int | None = None) -> None:
            shutil.copytree(tmp_path / "live", tmp_path / "after")
            await super().resume(version)

    async def test() -> None:
        (tmp_path / "live").mkdir()
        with Journal(tmp_path / "live" / "j") as journal:
            router = Router(KilledEngine())
            await router.restore(journal)
            await router.pause()
            await router.resume(3)
        with Journal(tmp_path / "after" / "j") as journal:
            restarted = Router(ScriptedEngine())
            await restarted.restore(journal)
            assert (restarted.version, restarted.paused) == (3, True)

    run(test)


def test_damaged_records_of_the_policy_start_it_paused(tmp_path: Path) -> None:
    async def test() -> None:
        with Journal(tmp_path / "j") as journal:
            router = Router(ScriptedEngine())
            await router.restore(journal)
            await router.resume(3)
        with closing(sqlite3.connect(tmp_path / "j")) as disk:
            disk.execute("UPDATE records SET record = x'00' WHERE seq = 2")
            disk.commit()
        with Journal(tmp_path / "j") as journal:
            router = Router(ScriptedEngine())
            await router.restore(journal, 2)
            assert (router.version, router.paused) == (3, True)

    run(test)


def test_added_replicas_are_used_again_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        async with FakeVllm() as one, FakeVllm() as two, FakeVllm() as three, FakeVllm() as four:
            for server in (one, two, three, four):
                server.json_by_path = SERVER_INFO

            def new_router() -> Router:
                return Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)

            with Journal(tmp_path / "j") as journal:
                router = new_router()
                await router.restore(journal)
                await router.add_replica(two.url)
                await router.add_replica(three.url)
                await router.pause()
                await router.resume(6)
                await router.add_replica(four.url)  # without the weights of version 6
                await router.remove_replica(VllmEngine(three.url).name)
                before = router.describe_replicas()
                await router.close()
                for _ in range(2):
                    router = new_router()
                    await router.restore(journal)
                    assert router.describe_replicas() == before
                    await router.close()

    run(test)


def test_a_replica_that_is_gone_at_a_restart_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        with Journal(tmp_path / "j") as journal:
            async with FakeVllm() as one, FakeVllm() as two:
                for server in (one, two):
                    server.json_by_path = SERVER_INFO
                router = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)
                await router.restore(journal)
                await router.add_replica(two.url)
                await router.close()
            router = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)
            await router.restore(journal)
            assert len(router.describe_replicas()) == 1
            assert "was not added again" in caplog.text
            await router.close()

    run(test)
