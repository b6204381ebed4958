"""The model API: paths, agents, headers, limits, stop strings, raw prompts. Scenarios part B has the rest."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.core.call import Delivery
from branchline.engines.scripted import ScriptedEngine
from branchline.engines.vllm import VllmEngine
from branchline.gateway.asgi import identify_agent
from branchline.gateway.config import GatewayConfig
from branchline.tree.journal import Journal
from tests.engines.fake_servers import FakeVllm
from tests.gateway.harness import Agent, agent, run

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
BOTH = Message("assistant", "hm", tool_calls=(ToolCall("look", "{}"), ToolCall("listen", "{}")))


async def _complete(a: Agent, prompt: Any, **body: Any) -> Any:
    return await a.http.post(
        f"{a.session.base_url}/completions",
        json={"prompt": prompt, **body},
        headers=a.api_headers,
    )


# -- agents ------------------------------------------------------------------------------------------


def test_agent_is_named_by_header_path_user_field_or_session_in_this_order() -> None:
    async def test() -> None:
        async with agent("x", agent="of the session") as a:
            body = {"messages": [{"role": "user", "content": "p"}]}
            by_path = a.session.base_url.removesuffix("/v1") + "/agents/the%20path/v1/chat/completions"
            by_header = {**a.api_headers, "x-branchline-agent": "the header"}
            without_session = f"{a.gateway.url}/agents/alone/v1/chat/completions"
            await a.http.post(by_path, json={**body, "user": "the user"}, headers=by_header)
            await a.http.post(by_path, json={**body, "user": "the user"}, headers=a.api_headers)
            await a.http.post(without_session, json=body, headers=a.api_headers)
            await a.ask_text("p", user="the user")
            await a.ask_text("p")
            lines = await a.timelines()
            assert sorted(line["agent"] for line in lines) == sorted(
                ["the header", "the path", "alone", "the user", "of the session"]
            )

    run(test)


@pytest.mark.parametrize("path", ["/v1/nothing", "/sessions/{id}/v1/chat", "/what/{id}/v1/models"])
def test_unknown_path_is_404_in_the_chat_envelope(path: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            url = a.gateway.url + path.format(id=a.session.id)
            response = await a.http.get(url, headers=a.api_headers)
            assert response.status_code == 404

    run(test)


def test_wrong_method_is_405() -> None:
    async def test() -> None:
        async with agent("x") as a:
            assert (await a.http.get(f"{a.session.base_url}/chat/completions")).status_code == 405
            assert (await a.http.post(f"{a.session.base_url}/models")).status_code == 405

    run(test)


def test_any_model_name_exists() -> None:
    async def test() -> None:
        async with agent("x") as a:
            listed = await a.http.get(f"{a.session.base_url}/models", headers=a.api_headers)
            assert [model["id"] for model in listed.json()["data"]] == ["scripted", "branchline"]
            one = await a.http.get(f"{a.session.base_url}/models/gpt-5", headers=a.api_headers)
            assert one.json()["id"] == "gpt-5"

    run(test)


def test_without_keys_all_clients_share_the_default_session() -> None:
    async def test() -> None:
        async with agent("x", config=GatewayConfig(auth=False)) as a:
            url = f"{a.gateway.url}/v1/chat/completions"
            for key in ({}, {"authorization": "Bearer whatever"}):
                answer = await a.http.post(
                    url, json={"messages": [{"role": "user", "content": "p"}]}, headers=key
                )
                assert answer.status_code == 200
            assert (await a.http.get(f"{a.gateway.url}/sessions/default")).json()["calls"] == 2

    run(test)


# -- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "status", "problem"),
    [
        (GatewayConfig(max_messages=2), 400, "messages: got '3 messages', expected at most 2"),
        (GatewayConfig(max_prompt_tokens=20), 400, "prompt is too long: 89 tokens > 20 maximum."),
        (GatewayConfig(max_body_bytes=60), 413, "expected at most 60 bytes"),
        (GatewayConfig(max_tools=1), 400, "tools: got '2 tools', expected at most 1"),
        (GatewayConfig(max_prompt_characters=30), 400, "characters', expected at most 30 in messages and"),
        (GatewayConfig(max_json_values=9), 400, "more than 9 commas and opening brackets', expected at"),
    ],
)
def test_requests_over_a_limit_are_refused_with_the_limit(
    config: GatewayConfig, status: int, problem: str
) -> None:
    async def test() -> None:
        async with agent("x", config=config) as a:
            tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
            tools_field: dict[str, Any] = {"tools": tools} if config.max_tools == 1 else {}
            refused = await a.ask("one", "two", "three" * 10, **tools_field)
            assert refused.status_code == status
            assert problem in refused.json()["error"]["message"]
            assert not a.engine.received_prompts

    run(test)


def test_calls_over_max_in_flight_are_429_with_retry_after() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec(), gate=asyncio.Event())
        assert engine.gate is not None
        async with agent(engine=engine, config=GatewayConfig(max_in_flight=1)) as a:
            first = asyncio.create_task(a.ask("p"))
            while not engine.received_prompts:
                await asyncio.sleep(0)
            refused = await a.ask("q")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            engine.gate.set()
            assert (await first).status_code == 200
            assert await a.ask_text("q") == "ok"

    run(test)


def test_session_whose_journal_failed_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def test() -> None:
        async with agent("x", journal=tmp_path / "j") as a:
            await a.ask_text("p")
            monkeypatch.setattr(Journal, "_write_inline", lambda _, **__: False)
            monkeypatch.setattr(Journal, "_commit", full)
            assert (await a.ask("p", "x", "q")).status_code == 503
            sampled = len(a.engine.received_prompts)
            refused = await a.ask("p", "x", "q")
            assert refused.status_code == 503
            assert "can only be read" in refused.text
            assert len(a.engine.received_prompts) == sampled, "sampled although the journal has failed"
            assert (await a.get(""))["state"] == "open"
            assert len(await a.timelines()) == 1

    run(test)


# -- stop strings and sampling -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_answer_and_the_next_prompt_has_its_tokens(stream: bool) -> None:
    async def test() -> None:
        async with agent("Action: look\nObservation: a door", "done", codec=ToyCodec.chatml()) as a:
            if stream:
                events = await a.stream("p", stop=["\nObservation:"])
                text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
                assert text == "Action: look"
                assert events[-1]["choices"][0]["finish_reason"] == "stop"
            else:
                assert await a.ask_text("p", stop="\nObservation:") == "Action: look"
            assert a.engine.aborted_count == 1
            assert await a.ask_text("p", "Action: look", "a wall") == "done"
            # The next prompt has all sampled ids, those of the stop string included.
            assert (
                a.prompts()[1]
                == "user:p<end>\nassistant:Action: look\nObservation:<end>\nuser:a wall<end>\nassistant:"
            )
            (line,) = await a.timelines()
            assert sum(line["mask"]) == len("Action: look\nObservation:") + len("done") + 1

    run(test)


def test_parallel_tool_calls_false_gives_one_call_per_answer() -> None:
    async def test() -> None:
        async with agent(BOTH, codec=ToyCodec.chatml()) as a:
            answer = (await a.ask("p", tools=TOOLS, parallel_tool_calls=False)).json()["choices"][0]
            assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["look"]
            assert answer["finish_reason"] == "tool_calls"
            answer = (await a.ask("p", tools=TOOLS)).json()["choices"][0]
            assert len(answer["message"]["tool_calls"]) == 2
            refused = await a.ask("p", tools=TOOLS, tool_choice="sometimes")
            assert refused.json()["error"]["param"] == "tool_choice"

    run(test)


def test_sampling_parameters_are_recorded_with_the_call() -> None:
    async def test() -> None:
        async with agent("x", sampling_defaults={"top_p": 0.9}, sampling={"temperature": 0.7}) as a:
            await a.ask_text("p", temperature=0, seed=3)
            (call,) = a.session.managed.session.tree.calls
            assert {name: call.sampling[name] for name in ("temperature", "top_p", "top_k", "seed")} == {
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 0,
                "seed": 3,
            }
            assert call.sampling["logprobs"] == "processed"

    run(test)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_session_limit_overrides_the_clients_under_either_name(name: str) -> None:
    async def test() -> None:
        async with agent("a long answer", sampling={"max_tokens": 3}) as a:
            assert await a.ask_text("p", **{name: 9}) == "a l"
        async with agent("a long answer", sampling_defaults={"max_tokens": 3}) as a:
            assert await a.ask_text("p", **{name: 6}) == "a long"

    run(test)


# -- raw prompts -------------------------------------------------------------------------------------


def test_raw_prompt_is_recorded_exactly_and_a_longer_one_continues_it() -> None:
    async def test() -> None:
        async with agent("two", "four") as a:
            first = (await _complete(a, "one ", return_token_ids=True, logprobs=0)).json()
            choice = first["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("two", "stop")
            assert choice["token_ids"] == list(b"two")
            assert choice["logprobs"]["tokens"] == ["t", "w", "o"]
            assert choice["logprobs"]["text_offset"] == [0, 1, 2]
            assert first["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
            second = await _complete(a, list(b"one two three "))
            assert second.json()["choices"][0]["text"] == "four"
            (line,) = await a.timelines()
            assert bytes(line["ids"]) == b"one two three four"
            assert line["mask"] == [0] * 4 + [1] * 3 + [0] * 7 + [1] * 4
            # The same text as a conversation is another prompt.
            await a.ask_text("one two")
            assert len(await a.timelines()) == 2

    run(test)


def test_streamed_completion_records_the_same_as_a_whole_one() -> None:
    async def test() -> None:
        async with agent("some words", "some words") as a:
            whole = (await _complete(a, "p ", return_token_ids=True)).json()["choices"][0]
            options = {"include_usage": True}
            streamed = await _complete(a, "p ", stream=True, return_token_ids=True, stream_options=options)
            events = [
                json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")
            ]
            choices = [event["choices"][0] for event in events if event["choices"]]
            assert "".join(choice["text"] for choice in choices) == whole["text"]
            assert [token for choice in choices for token in choice.get("token_ids", ())] == whole[
                "token_ids"
            ]
            assert choices[-1]["finish_reason"] == "stop"
            assert events[-1]["usage"]["completion_tokens"] == 10
            assert streamed.text.endswith("data: [DONE]\n\n")
            one, two = await a.timelines()
            assert (one["ids"], one["mask"]) == (two["ids"], two["mask"])

    run(test)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "p", "echo": True}, "echo"),
        ({"prompt": "p", "logprobs": 99}, "logprobs"),
        ({"prompt": "p", "n": 0}, "n"),
    ],
)
def test_invalid_completion_request_names_its_field(body: dict[str, Any], field: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await a.http.post(f"{a.session.base_url}/completions", json=body, headers=a.api_headers)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == field

    run(test)


# -- headers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_tokens", "answer"), [(3, "a l"), (9, "a long an")])
@pytest.mark.parametrize("limit", ["", "6"])
def test_max_tokens_header_limits_the_sessions_own_sampling(max_tokens: int, answer: str, limit: str) -> None:
    async def test() -> None:
        async with agent("a long answer", sampling={"max_tokens": max_tokens}) as a:
            headers = {"x-branchline-max-tokens": limit} if limit else {}
            assert await a.ask_text("p", headers=headers, max_tokens=6) == (answer[:6] if limit else answer)

    run(test)


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1.5", "9" * 11])
def test_invalid_max_tokens_header_is_refused(limit: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await a.ask("p", headers={"x-branchline-max-tokens": limit})
            assert refused.status_code == 400
            assert "x-branchline-max-tokens: got" in refused.json()["error"]["message"]
            assert not a.engine.received_prompts

    run(test)


async def _disconnect(a: Agent, server: FakeVllm, **headers: str) -> str:
    """Streams a call until the server holds, and disconnects; returns its id."""
    headers["authorization"] = f"Bearer {a.session.api_key}"
    body = {"messages": [{"role": "user", "content": "p"}], "stream": True}
    url = f"{a.session.base_url}/chat/completions"
    async with httpx.AsyncClient() as http, http.stream("POST", url, json=body, headers=headers) as response:
        line = await anext(response.aiter_lines())
        await server.is_held.wait()
        return str(json.loads(line[6:])["id"])


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_client_resumes_its_call(named: bool, stream: bool) -> None:
    async def test() -> None:
        async with FakeVllm() as server:
            server.hold_after = 5
            async with agent(gateway_engine=VllmEngine(server.url), sampling={"max_tokens": 9}) as a:
                name = {"x-branchline-call": "mine"}
                call_id = await _disconnect(a, server, **(name if named else {}))
                server.hold_after = None
                headers = name if named else {"x-branchline-resume": call_id}
                response = await a.ask("p", headers=headers, stream=stream)
                assert response.status_code == 200, response.text
                if named:
                    assert response.headers["x-request-id"] == "mine~2"
                report = (await a.get("/samples"))["report"]
                assert report["sampled_tokens"] == report["trained_tokens"] == 9
                assert not report["dropped"]
                # The second request continued the ids of the first.
                first, second = (body["prompt"] for body in server.bodies)
                assert second[: len(first)] == first
                assert 0 < len(second) - len(first) <= 5

    run(test)


def test_call_that_cannot_be_resumed_is_409_and_an_invalid_name_400() -> None:
    async def test() -> None:
        async with agent("one", "two") as a:
            done = await a.ask("p", headers={"x-branchline-call": "mine"})
            resumed = await a.ask("p", headers={"x-branchline-resume": done.json()["id"]})
            assert (resumed.status_code, resumed.json()["error"]["code"]) == (409, "conflict")
            refused = await a.ask("p", headers={"x-branchline-call": "a b"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-branchline-call")

    run(test)


def test_disconnect_before_a_buffered_answer_keeps_what_was_sampled() -> None:
    async def test() -> None:
        async with FakeVllm() as server:
            server.hold_after = 5
            async with agent(gateway_engine=VllmEngine(server.url), sampling={"max_tokens": 9}) as a:
                call = asyncio.create_task(a.ask("p"))
                await server.is_held.wait()
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                tree = a.session.managed.session.tree
                while not tree.calls or tree.delivery(tree.calls[0]) != Delivery.CANCELLED:
                    await asyncio.sleep(0)
                ids = tree.nodes[-1].sampled_ids
                assert ids is not None
                assert 0 < len(ids) <= 5

    run(test)


# -- agents named by headers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "identity"),
    [
        ({}, ("", "")),
        ({"x-branchline-agent": "critic"}, ("critic", "")),
        (
            {"x-branchline-agent": "critic", "x-branchline-parent-agent": "main"},
            ("critic", "main"),
        ),
        ({"x-claude-code-agent-id": "a1"}, ("a1", "")),
        ({"x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}, ("a2", "a1")),
        # The main conversation has no name, so that a restarted client is the same agent.
        ({"session-id": "s1", "thread-id": "s1"}, ("", "")),
        (
            {"session-id": "s1", "thread-id": "t2", "x-codex-parent-thread-id": "s1"},
            ("t2", "s1"),
        ),
        ({"thread-id": "t2"}, ("", "")),
        ({"x-session-id": "s1"}, ("", "")),
        ({"x-session-id": "s2", "x-parent-session-id": "s1"}, ("s2", "s1")),
        # Branchline's own headers have precedence.
        ({"x-branchline-agent": "critic", "x-claude-code-agent-id": "a1"}, ("critic", "")),
    ],
)
def test_headers_name_an_agent_and_its_parent(headers: dict[str, str], identity: tuple[str, str]) -> None:
    assert identify_agent(headers) == identity


def test_named_agent_and_its_parent_are_in_the_tree() -> None:
    async def main() -> None:
        async with agent("hello") as client:
            thread = {"session-id": "s1", "thread-id": "t2", "x-codex-parent-thread-id": "s1"}
            for headers in ({"session-id": "s1", "thread-id": "s1"}, thread):
                assert (await client.ask("hi", headers=headers)).status_code == 200
            calls = client.session.managed.session.tree.calls
            assert [(call.agent, call.spawned_by) for call in calls] == [("", ""), ("t2", "s1")]

    run(main)
