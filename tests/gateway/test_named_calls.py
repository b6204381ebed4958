"""A call that its client named before it was sent is gone on with when it is sent again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from branchline import ToyCodec
from branchline.engines.scripted import ScriptedEngine, replies
from tests.gateway.harness import Agent, agent, run
from tests.gateway.test_resume import ANSWER, _engine


def _named(name: str) -> dict[str, str]:
    return {"x-branchline-call": name}


async def _disconnect_early(a: Agent, name: str) -> None:
    """Asks until the engine holds, and hangs up without having heard anything."""
    engine: Any = a.engine
    engine.held.clear()
    asking = asyncio.create_task(a.ask("p", headers=_named(name)))
    await engine.held.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def test_a_named_call_goes_on_though_nothing_was_heard_of_it() -> None:
    async def test() -> None:
        async with agent(engine=_engine(4, 3)) as a:
            await _disconnect_early(a, "mine")
            await _disconnect_early(a, "mine")
            answer = (await a.ask("p", headers=_named("mine"))).json()
            assert answer["choices"][0]["message"]["content"] == ANSWER
            assert answer["id"] == "mine~3"
            told = await a.get("/samples")
            assert told["report"]["sampled_tokens"] == told["report"]["trained_tokens"] == len(ANSWER) + 1
            assert [len(ids) for ids in a.engine.received_prompts[1:]] == [
                len(a.engine.received_prompts[0]) + n for n in (4, 7)
            ]

    run(test)


@pytest.mark.parametrize("codec", [ToyCodec(), ToyCodec.chatml()])
@pytest.mark.parametrize("most", [4, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_nobody_heard_is_said_again_and_counts_once(
    codec: ToyCodec, most: int, stream: bool
) -> None:
    async def test() -> None:
        async with agent("said once", "said twice", codec=codec) as a:
            ask = {"headers": _named("mine"), "max_tokens": most}
            first = (await a.ask("p", **ask)).json()["choices"][0]
            if stream:
                events = await a.stream("p", **ask)
                said = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
                finish = events[-1]["choices"][0]["finish_reason"]
            else:
                again = (await a.ask("p", **ask)).json()["choices"][0]
                said, finish = again["message"]["content"], again["finish_reason"]
            assert (said, finish) == (first["message"]["content"], first["finish_reason"])
            assert len(a.engine.received_prompts) == 1
            told = await a.get("/samples")
            (sample,) = told["samples"]
            assert told["report"]["sampled_tokens"] == len(sample["response_ids"])
            assert not told["report"]["dropped"]

    run(test)


def test_an_attempt_that_failed_leaves_the_one_before_it_to_go_on_from() -> None:
    async def test() -> None:
        async with agent(engine=_engine(5)) as a:
            await _disconnect_early(a, "mine")
            works = a.engine.rule
            a.engine.rule = replies(ValueError("out of order"))
            assert (await a.ask("p", headers=_named("mine"))).status_code == 502
            a.engine.rule = works
            assert await a.ask_text("p", headers=_named("mine")) == ANSWER
            assert not (await a.get("/samples"))["report"]["dropped"]

    run(test)


def test_a_name_stands_for_one_prompt_and_what_was_gone_on_from_is_over() -> None:
    async def test() -> None:
        async with agent("one", "two") as a:
            assert await a.ask_text("p", headers=_named("mine")) == "one"
            refused = await a.ask("another", headers=_named("mine"))
            assert refused.status_code == 409
            assert "another prompt" in refused.text
            assert await a.ask_text("p", "one", "q", headers=_named("next")) == "two"
            assert (await a.ask("p", headers=_named("mine"))).status_code == 409, "something follows it"

    run(test)


def test_names_are_told_apart_and_checked() -> None:
    async def test() -> None:
        async with agent("one", "two", "three") as a:
            assert await a.ask_text("p", headers=_named("a")) == "one"
            assert await a.ask_text("p", headers=_named("a.b")) == "two"
            assert await a.ask_text("p") == "three"
            for name in ("a~2", "a b", "x" * 97):
                refused = await a.ask("p", headers=_named(name))
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-branchline-call")

    run(test)


def test_a_named_call_goes_on_behind_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        journal = tmp_path / "journal"
        async with agent(engine=_engine(4), journal=journal) as a:
            await _disconnect_early(a, "mine")
            session = a.session
        engine = _engine()
        async with agent(engine=engine, journal=journal, id="other") as b:
            answer = await b.http.post(
                f"{b.gateway.url}/sessions/{session.id}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "p"}]},
                headers={"authorization": f"Bearer {session.api_key}", **_named("mine")},
            )
            assert answer.json()["choices"][0]["message"]["content"] == ANSWER
            assert answer.json()["id"] == "mine~2"
            assert engine.codec.decode(engine.received_prompts[0]).endswith(f"assistant:{ANSWER[:4]}")

    run(test)


def test_sent_twice_at_once_the_second_waits_for_the_first() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), replies("once", "twice"), gate=asyncio.Event())
        async with agent(engine=engine) as a:
            first = asyncio.create_task(a.ask_text("p", headers=_named("mine")))
            while not engine.received_prompts:
                await asyncio.sleep(0)
            second = asyncio.create_task(a.ask_text("p", headers=_named("mine")))
            while a.session.managed.attempt_counts["mine"] < 2:
                await asyncio.sleep(0)
            assert engine.gate is not None
            engine.gate.set()
            assert [await first, await second] == ["once", "once"]
            assert len(engine.received_prompts) == 1

    run(test)
