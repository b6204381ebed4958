"""Samples over HTTP: the whole export policy, rewards for parts, aborted sessions, the end of a session."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from branchline import ToyCodec
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.engines.upstream_chat import UpstreamChat
from branchline.gateway.server import Gateway
from tests.engines.fake_servers import FakeChat
from tests.engines.test_upstream_chat import chat_event
from tests.gateway.harness import Agent, agent, run


async def get_response(a: Agent, path: str) -> httpx.Response:
    return await a.http.get(f"{a.gateway.url}/sessions/{a.session.id}{path}", headers=a.control_headers)


async def post(a: Agent, path: str, body: Any = None, *, key: str = "") -> httpx.Response:
    return await a.http.post(
        f"{a.gateway.url}/sessions/{a.session.id}{path}",
        json=body,
        headers={"authorization": f"Bearer {key or a.session.control_key}"},
    )


async def forked(a: Agent) -> None:
    """Asks for the answer A1 and three continuations of it."""
    await a.ask_text("p")
    for text in "xyz":
        await a.ask_text("p", "A1", text)


REPLIES = ("A1", "BB", "CCC", "DDDD")


class WithoutLogprobs(ScriptedEngine):
    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = "", **options: Any
    ) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(prompt_ids, params, session=session, **options):
            yield Chunk(chunk.ids, None, chunk.version, chunk.finish_reason)


# -- the policy --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "trained"),
    [
        ("", [4, 5, 6]),
        ("?shares=first", [4, 3, 4]),
        ("?shares=all", [4, 5, 6]),
        ("?max_samples=1", [6]),
        ("?max_samples=2&keep=random&seed=3", None),
        ("?drop=edit", [4]),
        ("?drop=edit&drop=best_of_n", [4]),
        ("?drop=", [4, 5, 6]),
        ("?max_tokens=20", [2, 2, 2]),
    ],
)
def test_the_export_policy_is_the_query(query: str, trained: list[int] | None) -> None:
    async def test() -> None:
        async with agent(*REPLIES) as a:
            await forked(a)
            body = await a.get(f"/samples{query}")
            counts = [sum(sample["response_mask"]) for sample in body["samples"]]
            assert counts == trained if trained is not None else len(counts) == 2
            assert (await a.get(f"/report{query}")) == body["report"]
            report = body["report"]
            dropped = sum(entry["tokens"] for entry in report["dropped"])
            assert report["sampled_tokens"] == report["trained_tokens"] + dropped == 11

    run(test)


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("share=first", "share"),
        ("shares=half", "shares: got 'half', expected one of split, first, all"),
        ("max_samples=0", "max_samples: got 0, expected a whole number of 1 or more, or None"),
        ("max_samples=x", "max_samples: got 'x', expected a whole number"),
        ("max_samples=1&max_samples=2", "max_samples: got ['1', '2'], expected one value"),
        ("drop=nothing", "drop: got 'nothing', expected one of"),
        ("include_inexact=maybe", "include_inexact: got 'maybe', expected true, false or context"),
        ("include_missing_logprobs=1", "include_missing_logprobs: got 1, expected true or false"),
        ("include_aborted=yes", "include_aborted: got 'yes', expected true or false"),
        ("missing_logprob=nan", "missing_logprob: got 'nan', expected a finite number or null"),
        ("seed=1.5", "seed: got 1.5, expected a whole number"),
    ],
)
def test_unknown_parameters_and_values_are_refused(query: str, problem: str) -> None:
    async def test() -> None:
        async with agent("A1") as a:
            await a.ask_text("p")
            for path in ("/samples", "/report"):
                refused = await get_response(a, f"{path}?{query}")
                assert refused.status_code == 400
                assert problem in refused.json()["error"]["message"]

    run(test)


def test_missing_logprobs_are_null_or_a_chosen_number() -> None:
    async def test() -> None:
        async with agent(engine=WithoutLogprobs(ToyCodec(), replies("A1"))) as a:
            await a.ask_text("p")
            (sample,) = (await a.get("/samples"))["samples"]
            assert sample["response_logprobs"] == [None, None]
            (sample,) = (await a.get("/samples?missing_logprob=0"))["samples"]
            assert sample["response_logprobs"] == [0.0, 0.0]
            assert sample["missing_logprobs"] == 2
            refused = await get_response(a, "/samples?include_missing_logprobs=false")
            assert refused.status_code == 409
            assert "2 of 2 sampled tokens came without logprobs" in refused.text

    run(test)


def test_an_upstream_capture_is_exported_when_asked_for() -> None:
    async def test() -> None:
        async with FakeChat() as server:
            server.scripted_events = (chat_event(content="fine"), chat_event("stop"))
            async with agent(gateway_engine=UpstreamChat(server.url + "/v1")) as a:
                await a.ask_text("p")
                assert not (await a.get("/samples"))["samples"]
                assert not (await a.get("/samples?include_inexact=context"))["samples"]
                (sample,) = (await a.get("/samples?include_inexact=true"))["samples"]
                assert not sample["exact"]
                assert sample["tokens_behind_other_ids"] == sum(sample["response_mask"]) > 0

    run(test)


# -- the end of a session ----------------------------------------------------------------------------


def test_an_aborted_session_exports_nothing_unless_asked() -> None:
    async def test() -> None:
        async with agent("A1") as a:
            await a.ask_text("p")
            assert len((await a.get("/samples"))["samples"]) == 1
            assert (await post(a, "/abort", {"reason": "sandbox died"})).status_code == 200
            body = await a.get("/samples")
            assert body["samples"] == []
            assert [(entry["reason"], entry["tokens"]) for entry in body["report"]["dropped"]] == [
                ("aborted", 2)
            ]
            assert len((await a.get("/samples?include_aborted=true"))["samples"]) == 1
            assert not (await a.session.export()).samples
            assert len((await a.session.export(include_aborted=True)).samples) == 1

    run(test)


def test_finalize_returns_what_the_library_returns() -> None:
    async def test() -> None:
        async with agent(*REPLIES) as a:
            await forked(a)
            await a.session.reward(0.5)
            body = {"reason": "done", "policy": {"shares": "first", "drop": ["edit"]}}
            response = await post(a, "/finalize", body)
            assert response.status_code == 200
            ended = response.json()
            assert (ended["state"], ended["reason"]) == ("finalized", "done")
            expected = await a.get("/samples?shares=first&drop=edit")
            assert {key: ended[key] for key in ("samples", "report")} == expected
            assert [sample["reward"] for sample in ended["samples"]] == [0.5]
            again = (await post(a, "/finalize", {"return": "session"})).json()
            assert "samples" not in again

    run(test)


def test_finalize_returns_the_trajectory_on_request() -> None:
    async def test() -> None:
        async with agent(*REPLIES) as a:
            await forked(a)
            await a.session.reward(0.5)
            trajectory = (await post(a, "/finalize", {"return": "trajectory"})).json()["trajectory"]
            assert [message["content"] for message in trajectory["history"]["messages"]] == [
                "p",
                "A1",
                "z",
                "DDDD",
            ]
            assert len(trajectory["additional_histories"]) == 2
            assert (trajectory["reward"], len(trajectory["rewards"])) == (0.5, 1)
            assert trajectory["metrics"] == {"calls": 4, "sampled_tokens": 11, "timelines": 3, "forks": 2}

    run(test)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"policy": {"shares": "half"}}, "shares: got 'half'"),
        ({"policy": {"share": "first"}}, "share"),
        ({"policy": []}, "policy: got [], expected an object"),
        ({"policy": {"max_samples": "1"}}, "max_samples: got '1', expected a whole number"),
        ({"return": "everything"}, "return: got 'everything', expected samples, trajectory or session"),
        ({"why": "x"}, "field: got 'why', expected only reason, return, policy"),
    ],
)
def test_a_refused_finalize_leaves_the_session_open(body: dict[str, Any], problem: str) -> None:
    async def test() -> None:
        async with agent("A1") as a:
            refused = await post(a, "/finalize", body)
            assert refused.status_code == 400
            assert problem in refused.json()["error"]["message"]
            assert a.session.managed.state == "open"

    run(test)


def test_an_agent_may_complete_its_own_session_and_do_no_more() -> None:
    async def test() -> None:
        async with agent("A1") as a:
            other = await a.gateway.session()
            key = a.session.api_key
            for path in ("/reward", "/finalize", "/abort"):
                assert (await post(a, path, {"score": 1}, key=key)).status_code == 403
            assert (await get_response(a, "/samples")).status_code == 200
            assert (
                await a.http.get(f"{a.gateway.url}/sessions/{a.session.id}", headers=a.api_headers)
            ).status_code == 403
            url = f"{a.gateway.url}/sessions/{other.id}/complete"
            assert (await a.http.post(url, headers=a.api_headers)).status_code == 403
            done = await post(a, "/complete", {"reason": "submitted"}, key=key)
            assert done.status_code == 200
            # What the agent may not read is not in the response.
            assert done.json() == {"id": a.session.id, "state": "completed", "reason": "submitted"}
            assert a.session.managed.state == "completed"

    run(test)


# -- rewards and timelines ---------------------------------------------------------------------------


def test_rewards_of_turns_calls_and_timelines_reach_the_samples() -> None:
    async def test() -> None:
        async with agent(*REPLIES) as a:
            response = await a.ask("p")
            call = response.json()["id"]
            await a.ask_text("p", "A1", "x")
            await a.ask_text("p", "A1", "y")
            (first, second) = await a.timelines()
            for reward in (
                {"score": 1.0},
                {"score": 0.1, "call": call},
                {"score": 0.2, "turn": 2},
                {"score": 0.3, "timeline": first["id"]},
            ):
                assert (await post(a, "/reward", reward)).status_code == 200
            one, two = (await a.get("/samples"))["samples"]
            assert (one["reward"], two["reward"]) == (0.3, 1.0)
            assert [(r["score"], r["call"] == call, r["tool"]) for r in one["rewards"]] == [
                (0.3, False, ""),
                (0.1, True, ""),
            ]
            assert [(r["score"], r["start"], r["end"]) for r in two["rewards"]] == [
                (0.1, 0, 2),
                (0.2, len(two["response_ids"]) - 3, len(two["response_ids"])),
            ]
            assert second["id"] > first["id"]

    run(test)


@pytest.mark.parametrize("part", [{"call": "unknown"}, {"turn": 0}, {"timeline": 99}, {"tool": 3}])
def test_a_reward_for_nothing_is_refused(part: dict[str, Any]) -> None:
    async def test() -> None:
        async with agent("A1") as a:
            await a.ask_text("p")
            refused = await post(a, "/reward", {"score": 1, **part})
            assert refused.status_code == 400
            assert f"{next(iter(part))}: got" in refused.json()["error"]["message"]
            assert a.session.managed.rewards == []

    run(test)


def test_rewards_of_parts_survive_a_restart(tmp_path: Any) -> None:
    async def test() -> None:
        journal = tmp_path / "j"
        async with agent("A1", journal=journal) as a:
            await a.ask_text("p")
            assert (await post(a, "/reward", {"score": 0.2, "turn": 1})).status_code == 200
            before = await a.get("/samples")
            session_id = a.session.id
        async with Gateway(engine=a.engine, codec=a.engine.codec, journal=journal) as again:
            export = again.sessions.get(session_id).export()
            assert [reward.score for reward in export.samples[0].rewards] == [0.2]
            assert before["samples"][0]["rewards"][0]["score"] == 0.2

    run(test)


def test_timelines_have_messages_authors_and_token_spans() -> None:
    async def test() -> None:
        async with agent("A1", "A2") as a:
            await a.ask_text("p")
            await a.ask_text("p", "A1", "q")
            (timeline,) = await a.timelines()
            assert [message["role"] for message in timeline["messages"]] == ["user", "assistant"] * 2
            assert [message["content"] for message in timeline["messages"]] == ["p", "A1", "q", "A2"]
            assert timeline["authors"] == ["env", "llm", "env", "llm"]
            starts = [start for start, _ in timeline["spans"]]
            assert starts == [0, *(end for _, end in timeline["spans"][:-1])]
            assert timeline["spans"][-1][1] == len(timeline["ids"])

    run(test)


# -- options of a session ----------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "search"}}


def test_samples_and_timelines_say_how_logprobs_were_measured() -> None:
    async def test() -> None:
        async with agent(*REPLIES) as a:
            await a.ask_text("p", temperature=0.5, top_p=0.9)
            await a.ask_text("p", "A1", "x", temperature=0)
            (sample,) = (await a.get("/samples"))["samples"]
            (timeline,) = (await a.get("/timelines"))["timelines"]
            start = len(sample["prompt_ids"])
            assert [
                (answer["logprobs"]["kind"], answer["logprobs"]["temperature"], answer["logprobs"]["top_p"])
                for answer in sample["answers"]
            ] == [("processed", 0.5, 0.9), ("processed", 0.0, 1.0)]
            assert [answer["logprobs"]["measured_temperature"] for answer in sample["answers"]] == [0.5, 1.0]
            for answer, other in zip(sample["answers"], timeline["answers"], strict=True):
                assert {**answer, "start": answer["start"] + start, "end": answer["end"] + start} == other
                assert all(sample["response_mask"][answer["start"] : answer["end"]])
            trajectory = a.session.managed.trajectory()
            assert [answer.logprobs.measured_temperature for answer in trajectory.samples[0].answers] == [
                0.5,
                1.0,
            ]

    run(test)


def test_a_managed_session_has_a_trajectory_with_its_rewards() -> None:
    async def test() -> None:
        async with agent(*REPLIES) as a:
            await forked(a)
            await post(a, "/reward", 0.25)
            await post(a, "/reward", {"score": 1.0, "turn": 1})
            trajectory = a.session.managed.trajectory(metrics={"steps": 4.0})
            assert (trajectory.reward, trajectory.failed, trajectory.session) == (0.25, False, a.session.id)
            assert [sample.reward for sample in trajectory.samples] == [0.25] * 3
            assert trajectory.samples[0].rewards[0].score == 1.0
            assert trajectory.metrics == {"steps": 4.0}
            await post(a, "/abort", {})
            aborted = a.session.managed.trajectory()
            assert (aborted.failed, aborted.samples, aborted.reward) == (True, (), 0.25)
            assert aborted.report is not None
            assert {drop.reason for drop in aborted.report.dropped} == {"aborted"}

    run(test)


def test_a_session_that_ignores_tools_is_one_timeline_that_is_trained() -> None:
    async def test() -> None:
        async with agent("A1", "A2", "A3", ignore_tools=True) as a:
            await a.ask_text("p")
            await a.ask_text("p", "A1", "q", tools=[TOOL])
            await a.ask_text("p", "A1", "q", "A2", "r")
            (timeline,) = await a.timelines()
            assert not timeline["exact"]
            assert [message["content"] for message in timeline["messages"]] == [
                "p",
                "A1",
                "q",
                "A2",
                "r",
                "A3",
            ]
            assert ['"search"' in prompt for prompt in a.prompts()] == [False, True, False]
            (sample,) = (await a.get("/samples"))["samples"]
            assert (sum(sample["response_mask"]), sample["exact"], sample["tokens_behind_other_ids"]) == (
                6,
                False,
                2,
            )
            body = await a.get("/samples?include_inexact=false")
            assert [entry["reason"] for entry in body["report"]["dropped"]] == ["inexact"]

    run(test)


def test_a_call_with_other_tools_is_resumed_after_the_ids_it_had_sampled() -> None:
    async def test() -> None:
        async with agent("A1", "A2", "A2", ignore_tools=True) as a:
            await a.ask_text("p")
            headers = {"x-branchline-call": "second"}
            await a.ask("p", "A1", "q", tools=[TOOL], headers=headers)
            again = await a.ask("p", "A1", "q", tools=[TOOL], headers=headers)
            assert again.status_code == 200
            assert again.json()["choices"][0]["message"]["content"] == "A2"
            other = {"type": "function", "function": {"name": "read"}}
            refused = await a.ask("p", "A1", "q", tools=[other], headers=headers)
            assert refused.status_code == 409
            assert "had another prompt" in refused.text
            assert sum((await a.get("/samples"))["samples"][0]["response_mask"]) == 4

    run(test)


def test_equal_answers_are_exported_once_with_dedupe() -> None:
    async def test() -> None:
        for dedupe, expected in ((False, 3), (True, 2)):
            async with agent("A1", "A1", "A2", dedupe=dedupe) as a:
                for _ in range(3):
                    await a.ask_text("p")
                body = await a.get("/samples")
                assert len(body["samples"]) == expected
                reasons = [entry["reason"] for entry in body["report"]["dropped"]]
                assert reasons == ["duplicate"] * (3 - expected)
                assert len((await a.get("/samples?drop="))["samples"]) == 3

    run(test)
