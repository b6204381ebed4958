"""Rewards over HTTP: each reaches the tokens that it names, or is refused with what there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.core.errors import SessionError
from branchline.core.sample import Sample
from branchline.export.jsonl import sample_from_json
from branchline.export.samples import Export
from branchline.export.tree_lines import samples_from_tree_lines
from branchline.gateway.server import Gateway
from branchline.runtime.managed_session import SessionRewarded
from branchline.tree.journal import Journal
from branchline.tree.tree import encode_record
from tests.gateway.harness import Agent, agent, run

SEARCH = Message("assistant", "", tool_calls=(ToolCall("search", "{}", "c1"),))


async def post(a: Agent, body: Any, *, key: str = "", path: str = "/reward") -> httpx.Response:
    return await a.http.post(
        f"{a.gateway.url}/sessions/{a.session.id}{path}",
        json=body,
        headers={"authorization": f"Bearer {key or a.session.control_key}"},
    )


async def post_all(a: Agent, *rewards: Any) -> None:
    for reward in rewards:
        response = await post(a, reward)
        assert response.status_code == 200, response.text


async def ask_as(a: Agent, name: str, *messages: Any) -> dict[str, Any]:
    response = await a.ask(*messages, headers={"x-branchline-agent": name})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def samples_of(a: Agent, query: str = "") -> list[Sample]:
    return [sample_from_json(raw) for raw in (await a.get(f"/samples{query}"))["samples"]]


def rewards_by_answer(export: Export) -> dict[str, list[float]]:
    """Returns the scores of each answer by its text, over all samples."""
    return {
        ToyCodec().decode(sample.response_ids[span.start : span.end]): [
            one.score for one in sample.rewards if (one.start, one.end) == (span.start, span.end)
        ]
        for sample in export.samples
        for span in sample.rewards
    }


# -- agents ------------------------------------------------------------------------------------------


def test_each_agent_gets_its_own_reward_whatever_was_posted_last() -> None:
    async def test() -> None:
        async with agent("S1", "C1") as a:
            await ask_as(a, "solver", "solve")
            await ask_as(a, "critic", "judge it")
            await post_all(a, {"score": 1, "agent": "solver"}, {"score": 0, "agent": "critic"})
            samples = await samples_of(a)
            assert {sample.agent: sample.reward for sample in samples} == {"solver": 1.0, "critic": 0.0}
            assert a.session.managed.reward is None
            await post_all(a, {"score": 0.5})
            assert {sample.agent: sample.reward for sample in await samples_of(a)} == {
                "solver": 1.0,
                "critic": 0.0,
            }

    run(test)


def test_an_agent_that_continues_another_ones_answers_gets_its_own_reward_for_its_own_tokens() -> None:
    async def test() -> None:
        async with agent("S1", "C1", "O1") as a:
            await ask_as(a, "solver", "solve")
            await ask_as(a, "critic", "solve", "S1", "judge")
            await ask_as(a, "other", "solve", "S1", "judge", "C1", "again")
            await post_all(
                a, {"score": 0.5}, {"score": 1, "agent": "solver"}, {"score": 0, "agent": "critic"}
            )
            for samples in (await samples_of(a), a.session.managed.export().samples):
                found = [
                    (
                        a.engine.codec.decode(sample.response_ids),
                        sample.reward,
                        [(s.agent, s.score) for s in sample.rewards],
                    )
                    for sample in samples
                ]
                assert found == [
                    ("S1", 1.0, [("solver", 1.0)]),
                    ("C1", 0.0, [("critic", 0.0)]),
                    ("O1", 0.5, []),
                ]

    run(test)


def test_a_timeline_overrides_its_agents_and_an_agent_its_session() -> None:
    async def test() -> None:
        async with agent("S1", "S2", "C1") as a:
            await ask_as(a, "solver", "one")
            await ask_as(a, "solver", "two")
            await ask_as(a, "critic", "three")
            timeline = (await a.timelines())[0]["id"]
            await post_all(
                a, {"score": 0.1, "timeline": timeline}, {"score": 0.2, "agent": "solver"}, {"score": 0.3}
            )
            assert [sample.reward for sample in await samples_of(a)] == [0.1, 0.2, 0.3]

    run(test)


@pytest.mark.parametrize("change", ["retry", "edit", "sub_agent"])
def test_a_turns_reward_stays_with_the_answer_that_it_named_when_it_was_posted(
    tmp_path: Path, change: str
) -> None:
    async def test() -> None:
        async with agent("A1", "A2", journal=tmp_path / "j") as a:
            is_reader = change == "sub_agent"
            name, part = ("reader", {"turn": 1, "agent": "reader"}) if is_reader else ("main", {"turn": 1})
            system = {"role": "system", "content": name}
            question, other = ({"role": "user", "content": text} for text in ("question", "another"))
            await ask_as(a, name, system, question)
            noted = {"score": -1, **part, "id": "step"}
            await post_all(a, noted, noted)
            await ask_as(a, name, system, question if change == "retry" else other)
            # A repetition of the request is known, although turn 1 is another answer now.
            await post_all(a, noted, {"score": 1, **part})
            assert rewards_by_answer(a.session.managed.export()) == {"A1": [-1.0], "A2": [1.0]}
        async with Gateway(engine=a.engine, codec=a.engine.codec, journal=tmp_path / "j") as again:
            export = again.sessions.get(a.session.id).export()
        assert rewards_by_answer(export) == {"A1": [-1.0], "A2": [1.0]}
        assert export.report.unassigned_rewards == 0

    run(test)


def test_one_answer_has_one_reward_however_it_is_named() -> None:
    async def test() -> None:
        async with agent("A1", "A2") as a:
            call = (await ask_as(a, "main", "p"))["id"]
            await post_all(
                a,
                {"score": 1, "turn": 1},
                {"score": 2, "turn": 1, "agent": "main"},
                {"score": 3, "call": call},
            )
            assert rewards_by_answer(a.session.managed.export()) == {"A1": [3.0]}
            await post_all(a, {"score": 4, "turn": 1}, {"score": 5, "turn": 1, "id": "other"})
            assert rewards_by_answer(a.session.managed.export()) == {"A1": [4.0, 5.0]}

    run(test)


def test_a_reward_of_several_choices_is_assigned_if_one_sample_has_it() -> None:
    async def test() -> None:
        async with agent("A1", "B1") as a:
            call = (await a.ask("p", n=2)).json()["id"]
            await post_all(a, {"score": 1, "call": call})
            for query, unassigned in (("", 0), ("?max_samples=1", 0), ("?drop=unknown&max_tokens=1", 1)):
                report = (await a.get(f"/samples{query}"))["report"]
                assert report["unassigned_rewards"] == unassigned

    run(test)


def test_a_timeline_is_named_by_an_end_that_it_has_or_had() -> None:
    async def test() -> None:
        async with agent("A1", "A2", "B2") as a:
            system, question = ({"role": role, "content": role} for role in ("system", "user"))
            first = (await a.ask(system, question)).json()["choices"][0]["message"]
            (former,) = [timeline["id"] for timeline in await a.timelines()]
            await a.ask(system, question, first, {"role": "user", "content": "more"})
            await a.ask(system, {"role": "user", "content": "other"})
            ends = [timeline["id"] for timeline in await a.timelines()]
            assert former not in ends
            accepted = []
            for node in range(1, 9):
                response = await post(a, {"score": node / 10, "timeline": node})
                if response.status_code == 200:
                    accepted.append(node)
                else:
                    expected = f"expected the id of a timeline of this session: {ends[0]}, {ends[1]}"
                    assert (response.status_code, expected in response.text) == (400, True)
            assert accepted == sorted([former, *ends])
            rewards = [node / 10 for node in ends]
            assert sorted(sample.reward or 0.0 for sample in await samples_of(a)) == rewards

    run(test)


# -- what does not exist -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ({"agent": "nobody"}, "agent: got 'nobody', expected an agent of this session: 'solver', 'critic'"),
        ({"agent": ""}, "agent: got '', expected the name of an agent"),
        ({"agent": "critic", "turn": 2}, "the number of an answer, from 1 on: agent 'critic' has 1"),
        ({"turn": 3}, "from 1 on: the main conversation has 2"),
        ({"tool": "shell"}, "tool: got 'shell', expected a tool that is called in this session: 'search'"),
        ({"tool": "search", "turn": 2}, "expected a tool that is called in that part: none"),
        ({"tool": "search", "agent": "critic"}, "expected a tool that is called in that part: none"),
        ({"call": "nothing"}, "call: got 'nothing', expected the id of a call of this session: 'chatcmpl-"),
        ({"timeline": 99}, "timeline: got 99, expected the id of a timeline of this session: "),
        ({"call_id": "x"}, "'call_id', expected one of score, call, turn, timeline, tool, agent, id, extras"),
        ({"turns": 1}, "field: got 'turns', expected one of score"),
        ({"note": "x"}, "anything else under `extras`"),
        ({"reward": 1}, "field: got 'reward', expected one of score"),
        ({"extras": [1]}, "extras: got [1], expected an object"),
        ({"id": {}}, "id: got {}, expected a text or a whole number"),
        ({"turn": None}, "turn: got None"),
        ({"turn": 1.0}, "turn: got 1.0"),
        ({"turn": 1, "timeline": 1}, "expected one part"),
        ({"turn": 1, "call": "x"}, "expected one part"),
        ({"timeline": 1, "tool": "search"}, "expected one part"),
        ({"agent": "critic", "call": "x"}, "expected one part"),
    ],
)  # fmt: skip
def test_a_reward_for_what_is_not_there_is_refused_with_what_there_is(
    reward: dict[str, Any], problem: str
) -> None:
    async def test() -> None:
        async with agent(SEARCH, "S2", "C1") as a:
            first = (await ask_as(a, "solver", "p"))["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "found"}
            await ask_as(a, "solver", "p", first, result)
            await ask_as(a, "critic", "judge it")
            await post_all(a, {"score": 1})
            refused = await post(a, {"score": 0.2, **reward})
            assert (refused.status_code, problem in refused.json()["error"]["message"]) == (400, True)
            refused = await post(a, [{"score": 0.5}, {"score": 0.2, **reward}])
            assert refused.status_code == 400
            assert a.session.managed.rewards == [{"score": 1.0}]
            await post_all(
                a,
                {"score": 2, "tool": "search"},
                {"score": 2, "tool": "search", "turn": 1},
                {"score": 2, "tool": "search", "agent": "solver"},
                {"score": 2, "tool": "search", "agent": "solver", "turn": 1},
                {"score": 2, "turn": 2},
            )

    run(test)


@pytest.mark.parametrize(
    "body", [b"", b"null", b'"1"', b"NaN", b"[]", b"[1]", b'{"score": 1e999}', b'{"score": 1, "score": 0}',
             b"\xff", b'{"score": 1, "extras": {"a": "\\ud800"}}', b"[" * 16_000]
)  # fmt: skip
def test_a_body_that_is_no_reward_is_refused(body: bytes) -> None:
    async def test() -> None:
        async with agent("A1") as a:
            await a.ask_text("p")
            url = f"{a.gateway.url}/sessions/{a.session.id}/reward"
            refused = await a.http.post(url, content=body, headers=a.control_headers)
            assert refused.status_code == 400, refused.text
            assert a.session.managed.rewards == []
            await post_all(a, True)
            assert a.session.managed.reward == 1.0

    run(test)


# -- extras ------------------------------------------------------------------------------------------


def test_extras_are_in_the_samples_of_every_format() -> None:
    async def test() -> None:
        async with agent("S1", "C1") as a:
            await ask_as(a, "solver", "solve")
            await ask_as(a, "critic", "solve", "S1", "judge")
            await ask_as(a, "critic", "solve", "S1", "judge", "other", "again")
            await post_all(
                a,
                {"score": 1, "extras": {"judge": "tests", "passed": 3}},
                {"score": 0, "agent": "critic", "extras": {"passed": 2}},
                {"score": 0.5, "turn": 1, "extras": {"why": "short"}},
            )
            url = f"{a.gateway.url}/sessions/{a.session.id}/samples"
            lines = (await a.http.get(f"{url}?format=jsonl", headers=a.control_headers)).text.splitlines()
            tree = (await a.http.get(f"{url}?format=tree", headers=a.control_headers)).text.splitlines()
            for samples in (
                await samples_of(a),
                (await a.session.export()).samples,
                [sample_from_json(json.loads(line)) for line in lines[:-1]],
                list(samples_from_tree_lines(map(json.loads, tree))),
            ):
                assert [
                    (sample.agent, sample.reward, json.loads(sample.reward_extras)) for sample in samples
                ] == [
                    ("solver", 1.0, {"judge": "tests", "passed": 3}),
                    ("critic", 0.0, {"judge": "tests", "passed": 2}),
                    ("critic", 0.0, {"judge": "tests", "passed": 2}),
                ]
                assert [[span.extras for span in sample.rewards] for sample in samples] == [
                    ['{"why":"short"}'],
                    ['{"passed":2}'],
                    ['{"passed":2}'],
                ]

    run(test)


def test_keyword_arguments_of_a_program_are_extras() -> None:
    async def test() -> None:
        async with agent("A1") as a:
            await a.ask_text("p")
            await a.session.reward(True, passed=3, id="x", extras={"turns": 2})
            await a.session.reward(True, passed=3, id="x", extras={"turns": 2})
            assert a.session.managed.rewards == [
                {"score": 1.0, "id": "x", "extras": {"passed": 3, "turns": 2}}
            ]
            (sample,) = await samples_of(a)
            assert json.loads(sample.reward_extras) == {"passed": 3, "turns": 2}

    run(test)


# -- ended sessions ----------------------------------------------------------------------------------


def test_a_reward_after_the_session_was_finalized_reaches_its_samples(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent("A1", journal=tmp_path / "j", agent_reward=True) as a:
            await a.ask_text("p")
            assert (await post(a, {}, path="/finalize")).status_code == 200
            await post_all(a, {"score": 0.5, "turn": 1}, {"score": 0.25, "extras": {"late": True}})
            assert [sample.reward for sample in await samples_of(a)] == [0.25]
            refused = await post(a, 1.0, key=a.session.api_key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "closed")
            assert (await a.get(""))["reward"] == 0.25
        async with Gateway(engine=a.engine, codec=a.engine.codec, journal=tmp_path / "j") as again:
            managed = again.sessions.get(a.session.id)
            (sample,) = managed.export().samples
            assert (managed.state, sample.reward) == ("finalized", 0.25)
            assert [span.score for span in sample.rewards] == [0.5]

    run(test)


def test_an_aborted_session_takes_no_reward() -> None:
    async def test() -> None:
        async with agent("A1") as a:
            await a.ask_text("p")
            await a.session.abort()
            refused = await post(a, 1.0)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "closed")
            with pytest.raises(SessionError, match="is aborted"):
                await a.session.reward(1.0)

    run(test)


def test_rewards_that_an_older_release_recorded_are_read_as_they_were_meant(tmp_path: Path) -> None:
    recorded: list[dict[str, Any]] = [
        {"score": 0.5, "note": "x", "reward": 0.5, "extras": [1]},
        {"score": 0.1, "turn": 1, "why": "short"},
        {"score": 0.2, "call": "unknown", "turn": 1},
        {"score": 0.3, "turn": 9},
        {"score": 0.4, "tool": "nobody"},
        {"score": 0.6, "turn": 1, "timeline": 2},
    ]

    async def test() -> None:
        async with agent("A1", journal=tmp_path / "j") as a:
            await a.ask_text("p")
        journal = Journal(tmp_path / "j")
        for reward in recorded:
            journal.append(a.session.id, encode_record(SessionRewarded(reward))).result()
        journal.close()
        async with Gateway(engine=a.engine, codec=a.engine.codec, journal=tmp_path / "j") as again:
            managed = again.sessions.get(a.session.id)
            assert managed.rewards[0] == {
                "score": 0.5,
                "extras": {"note": "x", "reward": 0.5, "extras": [1]},
            }
            assert managed.rewards[1] == {"score": 0.1, "turn": 1, "extras": {"why": "short"}}
            (sample,) = managed.export().samples
            assert sample.reward == 0.5
            assert json.loads(sample.reward_extras) == {"note": "x", "reward": 0.5, "extras": [1]}
            assert [(span.score, span.turn, span.tool) for span in sample.rewards] == [
                (0.4, None, "nobody"),
                (0.6, 1, ""),
            ]
            assert managed.export().report.unassigned_rewards == 2

    run(test)
