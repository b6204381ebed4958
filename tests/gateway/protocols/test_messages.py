"""Anthropic's Messages over real HTTP: answers, streams, tools, thinking, stop reasons, counts, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.core.errors import EngineError, JournalError
from branchline.engines.base import Chunk
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.config import GatewayConfig
from tests.gateway.harness import run
from tests.gateway.protocols.messages_client import (
    CALL,
    TOOLS,
    blocks_in,
    messages_client,
    text,
    tool_results,
)

CHATML = ToyCodec.chatml()
BOTH = Message("assistant", "", tool_calls=(ToolCall("look", '{"at": 1}'), ToolCall("look", '{"at": 2}')))


# -- answers -----------------------------------------------------------------------------------------


def test_response_has_blocks_stop_reason_and_call_id() -> None:
    async def test() -> None:
        async with messages_client(CALL, codec=CHATML) as c:
            answer = await c.ask("p", tools=TOOLS)
            thinking, reply, use = answer.pop("content")
            assert (thinking["type"], thinking["thinking"]) == ("thinking", "where?")
            assert reply == text("I look.")
            assert use == {"type": "tool_use", "id": use["id"], "name": "look", "input": {"at": 1}}
            assert [[answer.pop("id")]] == await c.calls()
            sampled = len(CHATML.encode_reply(CALL))
            assert answer == {
                "type": "message",
                "role": "assistant",
                "model": "toy",
                "stop_reason": "tool_use",
                "stop_sequence": None,
                "usage": {
                    "input_tokens": len(c.client.engine.received_prompts[0]),
                    "cache_creation_input_tokens": 0,
                    "cache_read_input_tokens": 0,
                    "output_tokens": sampled,
                },
            }

    run(test)


def test_stream_opens_and_closes_each_block_with_usage_at_the_end() -> None:
    async def test() -> None:
        async with messages_client(CALL, codec=CHATML) as c:
            events = await c.events("p", tools=TOOLS)
            kinds = [event["type"] for event in events]
            (thinking, reply, use) = blocks_in(events)
            assert (thinking["thinking"], reply["text"], use["input"]) == ("where?", "I look.", {"at": 1})
            assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
            start = events[0]["message"]
            assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
            opened = [event["content_block"] for event in events if event["type"] == "content_block_start"]
            assert [block["type"] for block in opened] == ["thinking", "text", "tool_use"]
            assert opened[2]["input"] == {}
            indices = [event["index"] for event in events if "index" in event]
            assert indices == sorted(indices)
            deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            (signature,) = [d["signature"] for d in deltas if d["type"] == "signature_delta"]
            assert start["id"] in signature
            assert "".join(d["thinking"] for d in deltas if d["type"] == "thinking_delta") == "where?"
            assert len([d for d in deltas if d["type"] == "text_delta"]) > 1
            assert deltas[-1] == {"type": "input_json_delta", "partial_json": '{"at": 1}'}
            assert kinds.count("content_block_stop") == 3
            assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
            assert events[-2]["usage"]["input_tokens"] == len(c.client.engine.received_prompts[0])
            assert [[start["id"]]] == await c.calls()

    run(test)


@pytest.mark.parametrize(
    "reply", [CALL, BOTH, "grüße 🙂", "", Message("assistant", "", reasoning_content="hm")]
)
def test_sdk_accumulates_a_stream_to_the_whole_response(reply: Message | str) -> None:
    async def test() -> None:
        async with messages_client(reply, codec=CHATML) as c:
            body: dict[str, Any] = {"model": "toy", "max_tokens": 500, "tools": TOOLS}
            body["messages"] = [{"role": "user", "content": "p"}]
            whole = await c.sdk.messages.create(**body)
            async with c.sdk.messages.stream(**body) as stream:
                streamed_text = "".join([part async for part in stream.text_stream])
                streamed = await stream.get_final_message()
            expected = reply if isinstance(reply, Message) else Message("assistant", reply)
            assert streamed_text == expected.content
            assert [_without_ids(block) for block in streamed.content] == [
                _without_ids(block) for block in whole.content
            ]
            assert (streamed.stop_reason, streamed.usage.output_tokens) == (
                whole.stop_reason,
                whole.usage.output_tokens,
            )
            assert whole.stop_reason == ("tool_use" if expected.tool_calls else "end_turn")

    run(test)


def _without_ids(block: Any) -> dict[str, Any]:
    """A block without what differs from answer to answer."""
    return {name: value for name, value in block.to_dict().items() if name not in ("id", "signature")}


def test_stop_reasons() -> None:
    async def test() -> None:
        async with messages_client("one two", codec=CHATML) as c:
            assert (await c.ask("p", max_tokens=3))["stop_reason"] == "max_tokens"
            assert (await c.ask("p"))["stop_reason"] == "end_turn"
            stopped = await c.ask("p", stop_sequences=["never", " tw"])
            assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " tw")
            assert stopped["content"] == [text("one")]
            events = await c.events("p", stop_sequences=[" tw"])
            assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " tw"}
            texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
            assert "".join(texts) == "one"

    run(test)


def test_session_stop_overrides_the_clients_and_its_default_does_not() -> None:
    async def test() -> None:
        async with messages_client("one two", sampling={"stop": ["o"]}) as c:
            assert (await c.ask("p", stop_sequences=["e"]))["stop_sequence"] == "o"
        async with messages_client("one two", sampling_defaults={"stop": "o", "max_tokens": 2}) as c:
            assert (await c.ask("p", stop_sequences=["n"]))["stop_sequence"] == "n"
            assert (await c.ask("p"))["stop_sequence"] == "o"
            body = {"model": "toy", "messages": [{"role": "user", "content": "p"}], "stop_sequences": ["x"]}
            short = (await c.post(body)).json()
            assert (short["stop_reason"], short["usage"]["output_tokens"]) == ("max_tokens", 2)

    run(test)


def test_last_events_are_sent_after_the_commit() -> None:
    async def test() -> None:
        async with messages_client(rule=lambda request: f"answer {request.call_index}") as c:
            turns: list[Any] = ["p"]
            for number in range(6):
                async with c.sdk.messages.stream(
                    model="toy", max_tokens=50, messages=[_turn(i, t) for i, t in enumerate(turns)]
                ) as stream:
                    async for event in stream:
                        if event.type == "message_delta":
                            assert (await c.client.get(""))["calls"] == number + 1
                    turns += [(await stream.get_final_message()).content, f"more {number}"]
            (line,) = await c.calls()
            assert len(line) == 6

    run(test)


def _turn(index: int, content: Any) -> Any:
    return {"role": "assistant" if index % 2 else "user", "content": content}


# -- tools and thinking ------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_sdk_tool_round_trip_is_one_timeline(streamed: bool) -> None:
    async def test() -> None:
        replies: list[Message | str] = [CALL, BOTH, CALL, "done"]
        async with messages_client(*replies, codec=CHATML) as c:
            messages: list[Any] = [{"role": "user", "content": "go"}]
            while True:
                body: Any = {"model": "toy", "max_tokens": 500, "tools": TOOLS, "messages": messages}
                if streamed:
                    async with c.sdk.messages.stream(**body) as stream:
                        answer = await stream.get_final_message()
                else:
                    answer = await c.sdk.messages.create(**body)
                messages.append({"role": "assistant", "content": answer.content})
                if answer.stop_reason != "tool_use":
                    break
                uses = [block for block in answer.content if block.type == "tool_use"]
                # Results are in the order in which the tools finished.
                found = tool_results(answer, *(f"at {block.input['at']}" for block in uses))[::-1]
                messages.append({"role": "user", "content": [*found, text("<system-reminder>")]})
            (line,) = await c.client.timelines()
            assert len(line["calls"]) == len(replies)
            sampled: int = sum(len(CHATML.encode_reply(_message(reply))) for reply in replies)
            assert sum(line["mask"]) == sampled
            for prompt_ids in c.client.engine.received_prompts:
                assert line["ids"][: len(prompt_ids)] == prompt_ids.tolist()
            assert "tool:at 1<end>\ntool:at 2<end>\nuser:<system-reminder>" in c.prompts()[-1]
            assert (await c.client.get("/tree"))["nodes"][-1]["text"] == "done"

    run(test)


def _message(reply: Message | str) -> Message:
    return reply if isinstance(reply, Message) else Message("assistant", reply)


@pytest.mark.parametrize(
    "arguments", ["north", "[1]", "", "{'at': True}", '{"at": 1.0, "at": 2}', "1e400", '{"a']
)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_arguments_that_are_no_object_are_wrapped_and_unwrapped(arguments: str, streamed: bool) -> None:
    async def test() -> None:
        call = Message("assistant", tool_calls=(ToolCall("look", arguments),))
        async with messages_client(call, "done", codec=CHATML) as c:
            body: Any = {"model": "toy", "max_tokens": 500, "messages": [{"role": "user", "content": "p"}]}
            if streamed:
                async with c.sdk.messages.stream(**body) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await c.sdk.messages.create(**body)
            assert isinstance(answer.content[0].input, dict)  # type: ignore[union-attr]
            echo = [block.to_dict() for block in answer.content]
            await c.ask("p", echo, tool_results(answer, "found"))
            assert [len(line) for line in await c.calls()] == [2]

    run(test)


def test_thinking_is_kept_when_echoed_and_restored_when_not() -> None:
    async def test() -> None:
        async with messages_client(Message("assistant", "A", reasoning_content="hm"), codec=CHATML) as c:
            content = (await c.ask("p"))["content"]
            await c.ask("p", content, "q")
            await c.ask("p", content[1:], "q")
            assert (
                c.prompts()[1]
                == c.prompts()[2]
                == "user:p<end>\nassistant:<think>hm</think>A<end>\nuser:q<end>\nassistant:"
            )
            assert len(await c.calls()) == 2
            # A changed signature makes another message.
            await c.ask("p", [{**content[0], "thinking": "aha"}, content[1]], "q")
            assert "<think>aha</think>A" in c.prompts()[3]
            assert len(await c.calls()) == 3

    run(test)


def test_signature_selects_among_equal_answers() -> None:
    async def test() -> None:
        async with messages_client(Message("assistant", "A", reasoning_content="hm"), codec=CHATML) as c:
            first, second = await c.ask("p"), await c.ask("p")
            await c.ask("p", second["content"], "q")
            lines = await c.calls()
            assert sorted(len(line) for line in lines) == [1, 2]
            assert [first["id"]] in lines
            unsigned = [{**second["content"][0], "signature": "c2lnbmVk"}, second["content"][1]]
            await c.ask("p", unsigned, "r")
            assert sorted(len(line) for line in await c.calls()) == [2, 2]

    run(test)


def test_tool_choice_none_hides_tools_and_others_show_them() -> None:
    async def test() -> None:
        async with messages_client(BOTH, codec=CHATML) as c:
            for kind in ("auto", "any", "none"):
                await c.ask("p", tools=TOOLS, tool_choice={"type": kind})
            await c.ask("p", tools=TOOLS, tool_choice={"type": "tool", "name": "look"})
            shown = [prompt.startswith("tools:") for prompt in c.prompts()]
            assert shown == [True, True, False, True]
            one = await c.ask(
                "p", tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
            )
            assert [block["input"] for block in one["content"]] == [{"at": 1}]

    run(test)


# -- counting ----------------------------------------------------------------------------------------


def test_count_tokens_is_the_prompt_length_and_records_nothing() -> None:
    async def test() -> None:
        async with messages_client(CALL, "done", codec=CHATML) as c:
            body: Any = {"model": "toy", "system": "s", "tools": TOOLS}
            messages: list[Any] = [{"role": "user", "content": "p"}]
            for _ in range(2):
                counted = await c.sdk.messages.count_tokens(**body, messages=messages)
                calls, prompts = (await c.client.get(""))["calls"], len(c.client.engine.received_prompts)
                answer = await c.sdk.messages.create(**body, messages=messages, max_tokens=500)
                assert counted.input_tokens == len(c.client.engine.received_prompts[-1])
                spent = answer.usage
                assert counted.input_tokens == spent.input_tokens + (spent.cache_read_input_tokens or 0)
                assert (calls, prompts) == (
                    (await c.client.get(""))["calls"] - 1,
                    len(c.client.engine.received_prompts) - 1,
                )
                messages.append({"role": "assistant", "content": answer.content})
                if answer.stop_reason == "tool_use":
                    # Without the thinking: the tree has it, so it counts.
                    messages[-1]["content"] = answer.content[1:]
                    messages.append({"role": "user", "content": tool_results(answer, "found")})
            assert spent.cache_read_input_tokens
            error = await c.refusal({"messages": []}, "/count_tokens")
            assert error["message"].startswith("messages:")

    run(test)


# -- errors ------------------------------------------------------------------------------------------


def test_statuses_have_anthropics_error_types() -> None:
    async def test() -> None:
        faults = [EngineError("GPU on fire"), "ok"]
        async with messages_client(*faults) as c:
            body: Any = {"model": "toy", "max_tokens": 5, "messages": [{"role": "user", "content": "p"}]}
            assert (await c.refusal(body, status=502))["type"] == "api_error"
            unknown = f"{c.client.gateway.url}/sessions/unknown"
            admin = c.sdk.with_options(base_url=unknown, api_key=c.client.gateway.admin_key)
            with pytest.raises(anthropic.NotFoundError, match="unknown"):
                await admin.messages.create(**body)
            with pytest.raises(anthropic.PermissionDeniedError, match="permission_error"):
                await c.sdk.with_options(api_key="wrong").messages.create(**body)
            without_key = await c.client.http.post(c.url, json=body)
            assert (without_key.status_code, without_key.json()["error"]["type"]) == (
                401,
                "authentication_error",
            )
            got = await c.client.http.get(c.url, headers={"x-api-key": c.client.session.api_key})
            assert (got.status_code, got.json()["error"]["type"]) == (405, "invalid_request_error")
            by_key = c.sdk.with_options(base_url=c.client.gateway.url)
            assert (await by_key.messages.create(**body)).content[0].text == "ok"  # type: ignore[union-attr]
            c.client.session.managed.journal = _FailedJournal()  # type: ignore[assignment]
            assert (await c.refusal(body, status=503))["type"] == "overloaded_error"
            c.client.session.managed.journal = None
            await c.client.session.abort()
            assert (await c.refusal(body, status=409))["type"] == "invalid_request_error"

    run(test)


class _FailedJournal:
    failure = JournalError("disk full")


def test_too_many_calls_is_a_rate_limit() -> None:
    async def test() -> None:
        gate = asyncio.Event()
        engine = ScriptedEngine(ToyCodec(), replies("ok"), gate=gate)
        async with messages_client(engine=engine, config=GatewayConfig(max_in_flight=1)) as c:
            first = asyncio.create_task(c.ask("p"))
            while not engine.received_prompts:
                await asyncio.sleep(0)
            body = {"model": "toy", "max_tokens": 5, "messages": [{"role": "user", "content": "q"}]}
            assert (await c.refusal(body, status=429))["type"] == "rate_limit_error"
            gate.set()
            assert (await first)["content"] == [text("ok")]

    run(test)


class _FailingEngine(ScriptedEngine):
    """Yields two chunks and fails."""

    async def generate(self, prompt_ids: Any, params: Any, *, session: str = "", images: Any = ()) -> Any:
        self.received_prompts.append(prompt_ids)
        for part in (b"one ", b"two "):
            yield Chunk(CHATML.encode(part.decode()), None, 0, None)
        raise EngineError("GPU on fire")


def test_engine_error_inside_a_stream_is_an_error_event() -> None:
    async def test() -> None:
        async with messages_client(engine=_FailingEngine(CHATML)) as c:
            events = await c.events("p")
            assert events[0]["type"] == "message_start"
            assert events[-1]["error"] == {"type": "api_error", "message": "GPU on fire"}
            assert events[-1]["request_id"] == events[0]["message"]["id"]
            assert (await c.client.get(""))["calls"] == 0
            with pytest.raises(anthropic.APIStatusError, match="GPU on fire"):
                async with c.sdk.messages.stream(
                    model="toy", max_tokens=5, messages=[{"role": "user", "content": "p"}]
                ) as stream:
                    await stream.until_done()

    run(test)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"[1]", "body"),
        (b"{broken", "body"),
        ({}, "messages"),
        ({"messages": "p"}, "messages"),
        ({"messages": ["p"]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"system": 7}, "system"),
        ({"system": [{"type": "text", "text": 7}]}, "system[0].text"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"description": "nameless", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_input_is_400_with_the_field_named(body: Any, field: str) -> None:
    async def test() -> None:
        async with messages_client("ok") as c:
            if isinstance(body, dict):
                body.setdefault(
                    "messages", None if field == "messages" else [{"role": "user", "content": "x"}]
                )
            error = await c.refusal(body)
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith(f"{field}: got ")
            assert not c.client.engine.received_prompts

    run(test)
