"""SCENARIOS part B over real HTTP: Chat Completions, sessions, keys, faults."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.core.errors import EngineError, EngineInputError
from branchline.core.token_arrays import as_ids
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from tests.gateway.harness import Agent, agent, run

CALL = Message(
    "assistant", "", tool_calls=(ToolCall("look", '{"at": 1, "far": false}'), ToolCall("hear", "{}"))
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def test_1_two_turns_are_one_trajectory() -> None:
    async def test() -> None:
        async with agent("A1", "A2") as a:
            assert await a.ask_text("p") == "A1"
            assert await a.ask_text("p", "A1", "x") == "A2"
            samples = (await a.get("/samples"))["samples"]
            (sample,) = samples
            decode = ToyCodec().decode
            assert decode(as_ids(sample["prompt_ids"])) == "user:p\nassistant:"
            assert decode(as_ids(sample["response_ids"])) == "A1user:x\nassistant:A2"
            assert sample["response_mask"] == [1] * 2 + [0] * 17 + [1] * 2

    run(test)


def test_2_sub_agent_with_another_system_prompt_is_a_separate_timeline() -> None:
    async def test() -> None:
        async with agent("m1", "s1", "m2") as a:
            main = [{"role": "system", "content": "main"}, {"role": "user", "content": "u"}]
            await a.ask_text(*main)
            await a.ask_text({"role": "system", "content": "sub"}, {"role": "user", "content": "v"})
            await a.ask_text(*main, {"role": "assistant", "content": "m1"}, {"role": "user", "content": "w"})
            lines = await a.timelines()
            assert len(lines) == 2
            assert sorted(len(line["calls"]) for line in lines) == [1, 2]

    run(test)


def test_3_concurrent_identical_requests_and_their_four_continuations_are_four_branches() -> None:
    async def test() -> None:
        gate = asyncio.Event()
        engine = ScriptedEngine(ToyCodec(), lambda ask: f"answer {ask.call_index}", gate=gate)
        async with agent(engine=engine) as a:
            both = [asyncio.create_task(a.ask_text("p")) for _ in range(2)]
            while len(engine.received_prompts) < 2:
                await asyncio.sleep(0)
            gate.set()
            first, second = await asyncio.gather(*both)
            assert {first, second} == {"answer 0", "answer 1"}
            await asyncio.gather(*(a.ask_text("p", first, "go on") for _ in range(4)))
            assert len(await a.timelines()) == 5

    run(test)


@pytest.mark.parametrize(
    "change",
    [
        {"content": ""},
        {"content": None},
        {"content": [{"type": "text", "text": ""}]},
        {"renamed": True},
        {"respelled": '{"far":false,"at":1}'},
        {"respelled": "{'at': 1, 'far': False}"},
        {"reordered": True},
    ],
    ids=lambda change: next(iter(change.items()))[0],
)
def test_4_tolerated_changes_of_a_reply_stay_one_trajectory(change: dict[str, Any]) -> None:
    async def test() -> None:
        async with agent(CALL, "done", codec=ToyCodec.chatml()) as a:
            response = await a.ask("p", tools=TOOLS)
            message = response.json()["choices"][0]["message"]
            assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
            calls = message["tool_calls"]
            if "content" in change:
                message["content"] = change["content"]
            if change.get("renamed"):
                for number, call in enumerate(calls):
                    call["id"] = f"renamed_{number}"
            if "respelled" in change:
                calls[0]["function"]["arguments"] = change["respelled"]
            if change.get("reordered"):
                calls.reverse()
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]}
                for call in calls
            ]
            await a.ask_text({"role": "user", "content": "p"}, message, *results, tools=TOOLS)
            (line,) = await a.timelines()
            assert len(line["calls"]) == 2
            # Results are in the order in which their calls were sampled.
            assert a.prompts()[-1].index("tool:look") < a.prompts()[-1].index("tool:hear")

    run(test)


def test_5_rewritten_reply_is_a_fork_and_context() -> None:
    async def test() -> None:
        async with agent("original", "next") as a:
            await a.ask_text("p")
            await a.ask_text("p", "rewritten", "q")
            lines = await a.timelines()
            assert sorted(sum(line["mask"]) for line in lines) == [4, 8]
            causes = [node["cause"] for node in (await a.get("/tree"))["nodes"]]
            assert "edit" in causes

    run(test)


def test_6_foreign_assistant_message_is_accepted() -> None:
    async def test() -> None:
        async with agent("ok") as a:
            await a.ask_text("1+1", "2", "2+2", "4", "3+3")
            await a.ask_text("p", "It starts with")
            assert all(sum(line["mask"]) == 2 for line in await a.timelines())

    run(test)


def test_7_prompt_at_the_limit_gets_an_empty_answer_without_an_engine_call() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec(), replies("yes"), max_context=len("user:p\nassistant:"))
        async with agent(engine=engine) as a:
            response = (await a.ask("p")).json()["choices"][0]
            assert (response["message"]["content"], response["finish_reason"]) == ("", "length")
            assert not engine.received_prompts
            assert (await a.get(""))["calls"] == 1
            engine.max_context = None
            assert await a.ask_text("p", "", "go on") == "yes"
            assert len(await a.timelines()) == 1

    run(test)


def test_7_prompt_over_the_limit_is_refused_with_the_message_that_makes_agents_compact() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec(), replies("yes"), max_context=10)
        async with agent(engine=engine) as a:
            refused = await a.ask("p")
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == (
                "prompt is too long: 17 tokens > 10 maximum. "
                "This model's maximum context length is 10 tokens."
            )
            assert not engine.received_prompts
            assert not a.session.managed.session.tree.calls

    run(test)


def test_7_a_cut_tool_call_never_reports_tool_calls() -> None:
    async def test() -> None:
        async with agent(CALL, codec=ToyCodec.chatml()) as a:
            choice = (await a.ask("p", max_tokens=12)).json()["choices"][0]
            assert choice["finish_reason"] == "length"
            assert "tool_calls" not in choice["message"]

    run(test)


def test_8_engine_error_changes_nothing_and_a_retry_succeeds() -> None:
    async def test() -> None:
        faults = [EngineError("GPU on fire"), EngineInputError("too many images"), ValueError("odd")]
        async with agent("A1", *faults, "A2") as a:
            await a.ask_text("p")
            before = await a.get("/tree")
            for status in (502, 400, 502):
                response = await a.ask("p", "A1", "x")
                assert response.status_code == status
                assert response.json()["error"]["message"]
                assert await a.get("/tree") == before
            assert await a.ask_text("p", "A1", "x") == "A2"
            assert len(await a.timelines()) == 1

    run(test)


def test_8_disconnect_aborts_the_engine_and_keeps_what_was_sampled() -> None:
    async def test() -> None:
        gate = asyncio.Event()
        engine = ScriptedEngine(
            ToyCodec(), replies("a long answer that is cut", "whole"), chunk_size=2, gate=gate
        )
        gate.set()
        async with agent(engine=engine) as a:
            url = f"{a.session.base_url}/chat/completions"
            headers = {"authorization": f"Bearer {a.session.api_key}"}
            body = {"messages": [{"role": "user", "content": "p"}], "stream": True}
            async with a.http.stream("POST", url, json=body, headers=headers) as response:
                async for line in response.aiter_lines():
                    if '"content":"a"' in line or '"content":" "' in line:
                        gate.clear()
                        break
            while not engine.aborted_count:
                await asyncio.sleep(0)
            gate.set()
            while (await a.get(""))["in_flight"]:
                await asyncio.sleep(0)
            assert (await a.get("/report"))["dropped"][0]["reason"] == "cancelled"
            assert await a.ask_text("p") == "whole"
            assert (await a.get("/report"))["trained_tokens"] == len("whole")

    run(test)


@pytest.mark.parametrize("verb", ["finalize", "abort"])
def test_8_answer_after_the_end_of_the_session_changes_nothing(verb: str) -> None:
    async def test() -> None:
        gate = asyncio.Event()
        engine = ScriptedEngine(ToyCodec(), replies("late"), gate=gate)
        async with agent(engine=engine) as a:
            late = asyncio.create_task(a.ask("p"))
            while not engine.received_prompts:
                await asyncio.sleep(0)
            control = {"authorization": f"Bearer {a.session.control_key}"}
            ended = await a.http.post(f"{a.gateway.url}/sessions/{a.session.id}/{verb}", headers=control)
            assert ended.status_code == 200
            gate.set()
            assert (await late).status_code == 409
            assert (await a.get(""))["calls"] == 0
            assert (await a.ask("again")).status_code == 409

    run(test)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ("[1]", "body"),
        ("{broken", "body"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', "messages[0].role"),
        ('{"messages": [{"role": "user", "content": "x"}], "n": 0}', "n"),
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "temperature"),
        ('{"messages": [{"role": "user", "content": "x"}], "stop": [1]}', "stop"),
    ],
)
def test_9_wrong_input_is_400_with_the_field_named(body: str, field: str) -> None:
    async def test() -> None:
        async with agent("ok") as a:
            response = await a.http.post(
                f"{a.session.base_url}/chat/completions",
                content=body,
                headers={"authorization": f"Bearer {a.session.api_key}"},
            )
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", field)

    run(test)


def test_9_null_is_absent_and_valid_values_are_accepted() -> None:
    async def test() -> None:
        async with agent("ok") as a:
            nothing = {"n": None, "tool_choice": None, "stop": None, "tools": None, "response_format": None}
            assert await a.ask_text("p", **nothing, max_completion_tokens=5) == "ok"
            three = (await a.ask("p", n=3, tool_choice="required", tools=TOOLS)).json()
            assert len(three["choices"]) == 3
            refused = await a.ask("p", response_format={"type": "json_object"})
            assert refused.status_code == 400
            assert "response_format" in refused.json()["error"]["message"]

    run(test)


def test_10_streamed_and_whole_answers_record_identical_trees() -> None:
    async def test() -> None:
        trees = []
        for streamed in (False, True):
            async with agent(
                Message("assistant", "grüße 🙂", reasoning_content="hm"), CALL, codec=ToyCodec.chatml()
            ) as a:
                if streamed:
                    events = await a.stream("p", stream_options={"include_usage": True})
                    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
                    assert "".join(delta.get("content") or "" for delta in deltas) == "grüße 🙂"
                    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm"
                    assert len(deltas) > 4
                    assert events[-1]["usage"]["completion_tokens"] > 0
                    events = await a.stream("q", tools=TOOLS)
                    calls = [
                        call
                        for event in events
                        for call in event["choices"][0]["delta"].get("tool_calls", ())
                    ]
                    assert [call["function"]["name"] for call in calls] == ["look", "hear"]
                    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
                else:
                    await a.ask_text("p")
                    await a.ask_text("q", tools=TOOLS)
                nodes = (await a.get("/tree"))["nodes"]
                trees.append([{key: value for key, value in node.items() if key != "call"} for node in nodes])
        assert trees[0] == trees[1]

    run(test)


class ChunkGate(asyncio.Event):
    """Lets through one chunk a ticket."""

    def __init__(self) -> None:
        super().__init__()
        self.permits: asyncio.Queue[None] = asyncio.Queue()

    def release(self, count: int) -> None:
        for _ in range(count):
            self.permits.put_nowait(None)

    async def wait(self) -> Any:
        return await self.permits.get()


def test_11_versions_are_kept_per_token_when_weights_change_in_flight() -> None:
    async def test() -> None:
        gate = ChunkGate()
        engine = ScriptedEngine(ToyCodec(), replies("one", "abcdefgh"), version=3, chunk_size=4, gate=gate)
        async with agent(engine=engine) as a:
            admin = {"authorization": f"Bearer {a.gateway.admin_key}"}

            async def policy(verb: str, **body: int) -> None:
                response = await a.http.post(f"{a.gateway.url}/policy/{verb}", json=body, headers=admin)
                assert response.status_code == 200

            gate.release(1)
            await a.ask_text("p")
            await policy("resume", version=4)
            gate.release(1)
            turns = (("user", "p"), ("assistant", "one"), ("user", "q"))
            body = {"messages": [{"role": role, "content": text} for role, text in turns], "stream": True}
            url, headers = (
                f"{a.session.base_url}/chat/completions",
                {"authorization": f"Bearer {a.session.api_key}"},
            )
            async with a.http.stream("POST", url, json=body, headers=headers) as response:
                async for line in response.aiter_lines():
                    if '"content":"d"' in line:
                        await policy("pause")
                        await policy("resume", version=5)
                        gate.release(1)
            (timeline,) = await a.timelines()
            sampled = zip(timeline["versions"], timeline["mask"], strict=True)
            versions = [version for version, mask in sampled if mask]
            assert versions == [3] * 3 + [4] * 4 + [5] * 4

    run(test)


def test_12_retried_request_is_a_sibling_with_cause_retry_and_its_loser_is_not_trained() -> None:
    async def test() -> None:
        async with agent("one", "two") as a:
            await a.ask_text("p")
            live = a.session.managed
            live.session.tree.deliveries.clear()  # the client never got it
            await a.ask("p", headers={"x-stainless-retry-count": "1"})
            assert "retry" in [node["cause"] for node in (await a.get("/tree"))["nodes"]]
            report = await a.get("/report")
            assert [drop["reason"] for drop in report["dropped"]] == ["retry"]

    run(test)


def test_13_each_key_opens_only_its_part() -> None:
    async def test() -> None:
        async with agent("ok") as a:
            other = await a.gateway.session()
            assert (await a.ask("p", key=other.api_key)).status_code == 403
            assert (await a.ask("p", key="wrong")).status_code == 403
            nothing = await a.http.post(f"{a.session.base_url}/chat/completions", json={"messages": []})
            assert nothing.status_code == 401
            root = f"{a.gateway.url}/sessions"
            own = {"authorization": f"Bearer {a.session.api_key}"}
            for path in ("", "/tree", "/samples", "/report"):
                response = await a.http.get(f"{root}/{a.session.id}{path}", headers=own)
                assert response.status_code == 403, path
                assert response.json()["error"]["type"] == "permission_error"
            for verb in ("reward", "finalize", "abort"):
                assert (
                    await a.http.post(f"{root}/{a.session.id}/{verb}", json=1, headers=own)
                ).status_code == 403
            admin = {"authorization": f"Bearer {a.gateway.admin_key}"}
            assert (await a.http.get(f"{root}/unknown", headers=admin)).status_code == 404
            assert (await a.http.post(root, headers=own)).status_code == 403
            by_key = await a.http.post(
                f"{a.gateway.url}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "p"}]},
                headers=own,
            )
            assert by_key.status_code == 200
            paid = await a.gateway.session(agent_reward=True)
            own = {"authorization": f"Bearer {paid.api_key}"}
            assert (
                await a.http.post(f"{root}/{paid.id}/reward", json={"score": 1}, headers=own)
            ).status_code == 200

    run(test)


def test_16_immediate_continuation_finds_its_node(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(rule=lambda ask: f"answer {ask.call_index}", journal=tmp_path / "j") as a:
            history: list[Any] = ["p"]
            for turn in range(12):
                events = await a.stream(*history) if turn % 2 else None
                text = (
                    "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
                    if events
                    else await a.ask_text(*history)
                )
                history += [text, f"more {turn}"]
            assert len(await a.timelines()) == 1

    run(test)


def test_restarted_gateway_continues_token_exact_with_the_same_keys(tmp_path: Path) -> None:
    async def test() -> None:
        codec = ToyCodec()
        journal = tmp_path / "j"
        async with Gateway(
            engine=ScriptedEngine(codec, replies("A1")), codec=codec, journal=journal
        ) as first:
            session = await first.session(id="s", metadata={"task": 7})
            async with httpx.AsyncClient() as http:
                a = Agent(first, session, http, first.app.router.default_engine)  # type: ignore[arg-type]
                await a.ask_text("p")
            await session.reward(0.5, why="good")
        async with Gateway(
            engine=ScriptedEngine(codec, replies("A2")), codec=codec, journal=journal
        ) as second:
            async with httpx.AsyncClient() as http:
                url = f"{second.url}/sessions/s/v1/chat/completions"
                body = {
                    "messages": [
                        {"role": "user", "content": "p"},
                        {"role": "assistant", "content": "A1"},
                        {"role": "user", "content": "x"},
                    ]
                }
                answer = await http.post(
                    url, json=body, headers={"authorization": f"Bearer {session.api_key}"}
                )
                assert answer.json()["choices"][0]["message"]["content"] == "A2"
                shown = await http.get(
                    f"{second.url}/sessions/s/samples",
                    headers={"authorization": f"Bearer {session.control_key}"},
                )
            (sample,) = shown.json()["samples"]
            assert codec.decode(as_ids(sample["response_ids"])) == "A1user:x\nassistant:A2"
            assert sample["reward"] == 0.5

    run(test)


def test_calls_over_the_generation_limit_are_429() -> None:
    async def test() -> None:
        gate = asyncio.Event()
        engine = ScriptedEngine(ToyCodec(), replies("ok"), gate=gate)
        async with agent(engine=engine, config=GatewayConfig(max_in_flight=1)) as a:
            first = asyncio.create_task(a.ask("p"))
            while not engine.received_prompts:
                await asyncio.sleep(0)
            second = await a.ask("q")
            assert second.status_code == 429
            assert second.headers["retry-after"] == "1"
            gate.set()
            assert (await first).status_code == 200

    run(test)


def test_session_sampling_overrides_the_client_and_defaults_fill_gaps() -> None:
    async def test() -> None:
        seen: list[tuple[float, float]] = []

        def rule(ask: Any) -> str:
            seen.append((ask.params.temperature, ask.params.top_p))
            return "ok"

        async with agent(rule=rule, sampling={"temperature": 1.0}, sampling_defaults={"top_p": 0.9}) as a:
            await a.ask_text("p", temperature=0)
            await a.ask_text("p", top_p=0.5)
        assert seen == [(1.0, 0.9), (1.0, 0.5)]

    run(test)


def test_token_ids_and_logprobs_on_request() -> None:
    async def test() -> None:
        async with agent("A1") as a:
            response = (await a.ask("p", logprobs=True, return_token_ids=True)).json()
            choice = response["choices"][0]
            assert choice["token_ids"] == list(b"A1")
            assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["A", "1"]
            assert bytes(response["prompt_token_ids"]) == b"user:p\nassistant:"
            events = await a.stream("p", logprobs=True, return_token_ids=True)
            streamed_ids = [token for event in events for token in event["choices"][0].get("token_ids", ())]
            assert streamed_ids == list(b"A1")
            assert json.dumps(events)

    run(test)
