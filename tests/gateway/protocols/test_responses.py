"""The Responses protocol over real HTTP: what it takes and answers, and that it records what Chat does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.core.errors import EngineError
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.server import Gateway
from tests.gateway.harness import agent, run
from tests.gateway.protocols.protocol_clients import (
    REPLIES,
    TOOLS,
    engine_of,
    over_chat,
    over_responses,
    parse_events,
    post_responses,
    respond,
    response_parts,
)

THOUGHT = Message("assistant", "yes", reasoning_content="hm")
LOOK = Message("assistant", "", reasoning_content="let me see", tool_calls=(ToolCall("look", '{"at": 1}'),))
ENCRYPTED_REASONING = {"include": ["reasoning.encrypted_content"], "store": False}


# -- the same conversation is the same record --------------------------------------------------------

REQUEST_MODES: dict[str, Any] = {
    "whole": {"stream": False},
    "streamed": {"stream": True},
    "streamed, summary": {"stream": True, "reasoning": {"summary": "auto"}},
    "by id": {"stream": False, "by_id": True},
    "by id, streamed": {"stream": True, "by_id": True},
    "as codex asks": {
        "stream": True,
        **ENCRYPTED_REASONING,
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
    },
}


@pytest.mark.parametrize("family", ["toy", "qwen3"])
def test_same_conversation_over_chat_and_responses_is_the_same_tree(family: str) -> None:
    async def test() -> None:
        records = {}
        for way, options in {"chat": None, "chat, streamed": None, **REQUEST_MODES}.items():
            engine, codec = engine_of(family)
            async with agent(engine=engine, codec=codec) as a:
                if options is None:
                    await over_chat(a, stream="streamed" in way)
                else:
                    await over_responses(a, **options)
                nodes = (await a.get("/tree"))["nodes"]
                lines = await a.timelines()
                records[way] = (
                    [ids.tolist() for ids in engine.received_prompts],
                    [{key: value for key, value in node.items() if key != "call"} for node in nodes],
                    [(line["ids"], line["mask"], line["logprobs"]) for line in lines],
                    (await a.get("/report"))["trained_tokens"],
                )
                assert len(engine.received_prompts) == len(REPLIES)
        assert any(sum(mask) for _, mask, _ in records["chat"][2])
        for way, record in records.items():
            assert record == records["chat"], way

    run(test)


def test_growing_conversation_is_one_timeline_without_equivalences() -> None:
    async def test() -> None:
        engine, codec = engine_of("toy")
        async with agent(engine=engine, codec=codec) as a:
            await over_responses(a, stream=True)
            (line,) = await a.timelines()
            assert len(line["calls"]) == len(REPLIES)
            assert all(not call.applied_equivalences for call in a.session.managed.session.tree.calls)

    run(test)


# -- answers -----------------------------------------------------------------------------------------


def test_response_has_all_fields_that_clients_read() -> None:
    async def test() -> None:
        async with agent(THOUGHT, codec=ToyCodec.chatml()) as a:
            fields = {
                "instructions": "short",
                "metadata": {"task": "7"},
                "temperature": 0.5,
                "max_output_tokens": 50,
                "tools": [*TOOLS, {"type": "web_search"}],
            }
            response = await respond(a, "p", **fields)
            assert {name: response[name] for name in fields} == fields
            assert (response["object"], response["status"]) == ("response", "completed")
            assert response["id"].startswith("resp_")
            assert (response["error"], response["incomplete_details"]) == (None, None)
            assert (response["tool_choice"], response["parallel_tool_calls"]) == ("auto", True)
            assert response["text"] == {"format": {"type": "text"}}
            reasoning, message = response["output"]
            assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
            assert reasoning["encrypted_content"] is None
            assert message["content"][0]["text"] == "yes"
            usage = response["usage"]
            assert usage["input_tokens"] == len(a.engine.received_prompts[0])
            assert usage["output_tokens"] == len(ToyCodec.chatml().encode_reply(THOUGHT))
            assert usage["output_tokens_details"] == {"reasoning_tokens": 2}
            assert usage["input_tokens_details"]["cached_tokens"] == 0
            again = await respond(a, ["p", *response["output"]][1:], **fields)
            assert again["id"] != response["id"]

    run(test)


def test_reused_tokens_are_reported_as_cached() -> None:
    async def test() -> None:
        async with agent("A1", "A2") as a:
            first = await respond(a, "p")
            second = await respond(a, "x", previous_response_id=first["id"])
            cached = second["usage"]["input_tokens_details"]["cached_tokens"]
            assert cached == len("user:p\nassistant:A1")

    run(test)


def test_stream_has_the_event_order_of_the_protocol() -> None:
    async def test() -> None:
        reply = Message(
            "assistant", "ok then", reasoning_content="hm hm", tool_calls=(ToolCall("look", '{"at": 1}'),)
        )
        async with agent(reply, codec=ToyCodec.chatml()) as a:
            events = parse_events((await post_responses(a, "p", stream=True, tools=TOOLS)).text)
            kinds = [event["type"].removeprefix("response.") for event in events]
            order = [kind for index, kind in enumerate(kinds) if kinds[index - 1 : index] != [kind]]
            assert order == [
                *("created", "in_progress"),
                *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
                *("content_part.done", "output_item.done"),
                *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
                *("content_part.done", "output_item.done"),
                *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
                *("output_item.done", "completed"),
            ]
            assert len(kinds) > len(order)
            response = events[-1]["response"]
            assert response_parts(response) == ("ok then", "hm hm", ['look {"at": 1}'])
            done = [event["item"] for event in events if event["type"].endswith("output_item.done")]
            assert done == response["output"]
            assert {event["response"]["id"] for event in events if "response" in event} == {response["id"]}
            whole = await respond(a, "p", tools=TOOLS)
            assert response_parts(whole) == response_parts(response)
            assert [item["type"] for item in whole["output"]] == [item["type"] for item in done]
            assert whole["usage"]["output_tokens_details"] == response["usage"]["output_tokens_details"]

    run(test)


def test_reasoning_is_a_summary_on_request() -> None:
    async def test() -> None:
        async with agent(THOUGHT, codec=ToyCodec.chatml()) as a:
            events = parse_events(
                (await post_responses(a, "p", stream=True, reasoning={"summary": "auto"})).text
            )
            kinds = [event["type"] for event in events]
            assert "response.reasoning_summary_part.added" in kinds
            deltas = [event for event in events if event["type"] == "response.reasoning_summary_text.delta"]
            assert "".join(event["delta"] for event in deltas) == "hm"
            assert {event["summary_index"] for event in deltas} == {0}
            reasoning = events[-1]["response"]["output"][0]
            assert (reasoning["summary"], reasoning["content"]) == (
                [{"type": "summary_text", "text": "hm"}],
                [],
            )

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_answer_cut_by_length_is_incomplete_and_can_be_continued(stream: bool) -> None:
    async def test() -> None:
        async with agent("a long answer", "and more", codec=ToyCodec.chatml()) as a:
            response = await respond(a, "p", max_output_tokens=6, stream=stream)
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
            assert response["output"][0]["status"] == "incomplete"
            assert response_parts(response)[0] == "a long"
            user = {"role": "user", "content": "p"}
            await respond(a, [user, *response["output"], {"role": "user", "content": "go on"}])
            assert len(await a.timelines()) == 1

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_empty_answer_is_an_item_that_can_be_sent_back(stream: bool) -> None:
    async def test() -> None:
        codec = ToyCodec.chatml()
        engine = ScriptedEngine(codec, replies("yes"), max_context=len("user:p") + 2 + len("assistant:"))
        async with agent(engine=engine) as a:
            response = await respond(a, "p", stream=stream)
            assert (response["status"], response_parts(response)) == ("incomplete", ("", "", []))
            assert not engine.received_prompts
            engine.max_context = None
            user = {"role": "user", "content": "p"}
            more = await respond(a, [user, *response["output"], {"role": "user", "content": "go on"}])
            assert response_parts(more)[0] == "yes"
            assert len(await a.timelines()) == 1

    run(test)


def test_text_after_a_call_is_a_separate_item_of_the_same_answer() -> None:
    async def test() -> None:
        codec = ToyCodec.chatml()
        call = codec.encode_reply(Message("assistant", "a", tool_calls=LOOK.tool_calls), stop=False)
        tail = codec.encode_reply(Message("assistant", "b"))

        class Talkative(ToyCodec):
            def encode_reply(self, message: Message, *, stop: bool = True) -> Any:
                return (
                    np.concatenate([call, tail]) if message.content == "ab" else codec.encode_reply(message)
                )

        engine = ScriptedEngine(Talkative(), replies("ab", "done"))
        async with agent(engine=engine, codec=codec) as a:
            response = await respond(a, "p", stream=True, tools=TOOLS)
            assert [item["type"] for item in response["output"]] == ["message", "function_call", "message"]
            assert len({item["id"] for item in response["output"]}) == 3
            user = {"role": "user", "content": "p"}
            result = {
                "type": "function_call_output",
                "call_id": response["output"][1]["call_id"],
                "output": "",
            }
            await respond(a, [user, *response["output"], result], tools=TOOLS)
            assert len(await a.timelines()) == 1

    run(test)


def test_engine_error_is_a_status_before_the_first_event_and_an_event_after_it() -> None:
    async def test() -> None:
        async with agent(EngineError("GPU on fire"), "ok") as a:
            refused = await post_responses(a, "p", stream=True)
            assert (refused.status_code, refused.json()["error"]["type"]) == (502, "server_error")
            engine = a.engine
            generate = engine.generate

            async def breaks(*args: Any, **options: Any) -> Any:
                async for chunk in generate(*args, **options):
                    yield chunk
                    raise EngineError("GPU on fire")

            engine.generate = breaks  # type: ignore[method-assign]
            engine.chunk_size = 1
            events = parse_events((await post_responses(a, "p", stream=True)).text)
            assert events[-1]["type"] == "response.failed"
            failed = events[-1]["response"]
            assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
            assert "GPU on fire" in failed["error"]["message"]
            assert (await a.get(""))["calls"] == 0

    run(test)


# -- items sent back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["all", "content", "summary", "encrypted_content", "nothing", "no ids"])
def test_reasoning_is_read_back_from_content_summary_or_encrypted_content(kept: str) -> None:
    async def test() -> None:
        summary = {"reasoning": {"summary": "auto"}} if kept == "summary" else {}
        async with agent(LOOK, "done", codec=ToyCodec.chatml()) as a:
            response = await respond(a, "p", tools=TOOLS, **ENCRYPTED_REASONING, **summary)
            reasoning, call = response["output"]
            for name, empty in (("content", None), ("summary", []), ("encrypted_content", None)):
                if kept not in ("all", "no ids", name):
                    reasoning[name] = empty
            if kept == "no ids":
                del reasoning["id"], call["id"]
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "saw"}
            await respond(a, [{"role": "user", "content": "p"}, reasoning, call, result], tools=TOOLS)
            (line,) = await a.timelines()
            assert len(line["calls"]) == 2
            used = [echo.equivalence for echo in a.session.managed.session.tree.calls[1].applied_equivalences]
            assert used == (["dropped_reasoning"] if kept == "nothing" else [])
            assert "let me see" in a.prompts()[1]

    run(test)


def test_encrypted_reasoning_of_another_server_is_ignored() -> None:
    async def test() -> None:
        async with agent("ok") as a:
            for encrypted in ("gAAAAABo", "branchline:!", "branchline:/w=="):
                reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": encrypted}
                text = {"role": "assistant", "content": "x"}
                await respond(a, [{"role": "user", "content": "p"}, reasoning, text])
            assert len(set(a.prompts())) == 1

    run(test)


def test_previous_response_id_omits_the_instructions() -> None:
    async def test() -> None:
        async with agent("A1", "A2", "A3") as a:
            first = await respond(a, "p", instructions="one")
            await respond(a, "x", previous_response_id=first["id"], instructions="two")
            await respond(a, "x", previous_response_id=first["id"])
            assert a.prompts()[1:] == [
                "system:two\nuser:p\nassistant:A1user:x\nassistant:",
                "user:p\nassistant:A1user:x\nassistant:",
            ]
            own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "p"}]
            mine = await respond(a, own)
            await respond(a, "x", previous_response_id=mine["id"])
            assert a.prompts()[-1].startswith("system:mine\nuser:p\n")

    run(test)


@pytest.mark.parametrize("which", [0, 1])
def test_id_selects_among_equal_answers(which: int) -> None:
    async def test() -> None:
        async with agent("same", "same", "next") as a:
            both = [await respond(a, "p") for _ in range(2)]
            await respond(a, "x", previous_response_id=both[which]["id"])
            items = [
                {"role": "user", "content": "p"},
                *both[which]["output"],
                {"role": "user", "content": "y"},
            ]
            await respond(a, items)
            tree = a.session.managed.session.tree
            duplicate = tree.nodes[tree.calls[which].outputs[0]]
            assert len(duplicate.all_children()) == 2

    run(test)


def test_restarted_gateway_finds_earlier_responses(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent("A1", journal=tmp_path / "j", id="s") as a:
            first = await respond(a, "p", instructions="one", stream=True)
            key = a.session.api_key
        engine = ScriptedEngine(ToyCodec(), replies("A2"))
        async with Gateway(engine=engine, journal=tmp_path / "j") as gateway, httpx.AsyncClient() as http:
            response = await http.post(
                f"{gateway.url}/v1/responses",
                json={"input": "x", "instructions": "one", "previous_response_id": first["id"]},
                headers={"authorization": f"Bearer {key}"},
            )
            assert response_parts(response.json())[0] == "A2"
            expected = "system:one\nuser:p\nassistant:A1user:x\nassistant:"
            assert [ToyCodec().decode(ids) for ids in engine.received_prompts] == [expected]
            assert len(gateway.sessions.get("s").session.tree.leaves()) == 1

    run(test)


def test_unknown_previous_response_is_refused_by_name() -> None:
    async def test() -> None:
        async with agent("ok") as a:
            other = await a.gateway.session()
            mine = await respond(a, "p")
            ids: list[Any] = ["resp_unknown", 7, {}]
            for response_id in ids:
                refused = await post_responses(a, "x", previous_response_id=response_id)
                assert (refused.status_code, refused.json()["error"]["param"]) == (
                    400,
                    "previous_response_id",
                )
            elsewhere = await a.http.post(
                f"{other.base_url}/responses",
                json={"input": "x", "previous_response_id": mine["id"]},
                headers={"authorization": f"Bearer {other.api_key}"},
            )
            assert elsewhere.json()["error"]["param"] == "previous_response_id"
            bare = {"prompt": "p", "max_tokens": 2}
            headers = {"authorization": f"Bearer {a.session.api_key}"}
            raw = await a.http.post(f"{a.session.base_url}/completions", json=bare, headers=headers)
            refused = await post_responses(a, "x", previous_response_id=raw.json()["id"])
            assert refused.json()["error"]["param"] == "previous_response_id"

    run(test)


# -- sampling ----------------------------------------------------------------------------------------


def test_session_sampling_overrides_the_clients() -> None:
    async def test() -> None:
        seen: list[Any] = []

        def rule(ask: Any) -> str:
            seen.append((ask.params.max_tokens, ask.params.temperature))
            return "ok"

        async with agent(rule=rule, sampling={"max_tokens": 5}, sampling_defaults={"temperature": 0.3}) as a:
            await respond(a, "p", max_output_tokens=900)
        assert seen == [(5, 0.3)]

    run(test)


def test_text_format_becomes_the_response_format_of_chat_completions() -> None:
    async def test() -> None:
        async with agent("ok") as a:
            format = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
            seen: list[Any] = []
            generate = a.engine.generate

            def watched(ids: Any, params: Any, **options: Any) -> Any:
                seen.append(params.grammar)
                return generate(ids, params, **options)

            a.engine.generate = watched  # type: ignore[assignment, method-assign]
            refused = await post_responses(a, "p", text={"format": format})
            assert refused.status_code == 400
            assert "response_format" in refused.json()["error"]["message"]
            a.engine.supported_fields = frozenset({"response_format"})
            await respond(a, "p", text={"format": format})
            await respond(a, "p", text={"format": {"type": "text"}, "verbosity": "low"})
            schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
            assert seen == [{"type": "json_schema", "json_schema": schema}, None]

    run(test)


def test_fields_for_vendor_servers_are_accepted() -> None:
    async def test() -> None:
        async with agent("ok") as a:
            nothing = dict.fromkeys(
                (
                    "instructions",
                    "tools",
                    "tool_choice",
                    "metadata",
                    "text",
                    "reasoning",
                    "include",
                    "background",
                )
            )
            await respond(a, "p", **nothing)
            everything = {
                "store": False,
                "truncation": "auto",
                "service_tier": "flex",
                "reasoning": {"effort": "high", "summary": None},
                "stream_options": {"include_obfuscation": False},
                "client_metadata": {"x": "y"},
                "safety_identifier": "s",
                "max_tool_calls": 3,
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []},
                "include": ["message.output_text.logprobs", "unknown"],
            }
            response = await respond(a, "p", **everything)
            assert response["truncation"] == "auto"
            assert a.prompts()[0] == a.prompts()[1]

    run(test)
