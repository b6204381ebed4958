"""Anthropic's Messages against anything a client may send: it is answered or refused, and never fails."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from branchline import Message, Request, ToolCall, ToyCodec
from branchline.chat.parsing.base import MessageDelta
from branchline.core.reader import replace_surrogates
from branchline.core.token_arrays import as_ids
from branchline.engines.base import SamplingParams
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.app import GatewayApp
from branchline.gateway.config import GatewayConfig
from branchline.gateway.protocols.base import ParsedRequest
from branchline.gateway.protocols.messages import MessagesStream
from branchline.gateway.protocols.messages_blocks import (
    input_json,
    read_conversation,
    signed_response_id,
    tool_use_block,
    write_blocks,
)
from branchline.runtime.answer import Answer, AnswerDelta
from branchline.runtime.call_record import CallRequest, CallResult
from branchline.runtime.session_store import SessionStore
from tests.gateway.harness import run
from tests.gateway.protocols.messages_client import CALL, blocks_in, events_in

CHATML = ToyCodec.chatml()

_words = st.sampled_from(["", "x", "x-anthropic-billing-header: y", "ü🙂", "https://a.test/b.png", "aGk="])
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=6,
)
_kinds = st.sampled_from(
    [
        "text",
        "image",
        "document",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "server_tool_use",
        "mcp_tool_result",
        "not_yet_invented",
    ]
)
_sources = st.fixed_dictionaries(
    {"type": st.sampled_from(["base64", "url", "text", "content", "file"])},
    optional={
        "data": _words,
        "url": _words,
        "media_type": _words,
        "content": st.lists(st.fixed_dictionaries({"type": _kinds}, optional={"text": _words}), max_size=2),
    },
)


def _blocks(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": _kinds},
        optional={
            "text": _words | _json,
            "source": _sources | _json,
            "content": _words | inner | _json,
            "thinking": _words | _json,
            "signature": _words,
            "id": _words | _json,
            "tool_use_id": _words,
            "name": _words | _json,
            "input": st.dictionaries(_words, _json, max_size=2) | _json,
            "is_error": st.booleans(),
            "cache_control": _json,
        },
    )


_content = _words | st.lists(_blocks(st.lists(_blocks(_json), max_size=2)) | _json, max_size=4) | _json
_roles = st.sampled_from(["user", "assistant", "system"])
_tool = st.fixed_dictionaries({}, optional={"name": _words, "type": _words, "input_schema": _json})
_bodies = st.fixed_dictionaries(
    {"messages": st.lists(st.fixed_dictionaries({"role": _roles, "content": _content}), max_size=4)},
    optional={
        "system": _content,
        "tools": st.lists(_tool, max_size=3) | _json,
        "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "none"])}) | _json,
        "stream": st.booleans(),
        "thinking": _json,
        "metadata": _json,
    },
)


async def _post(path: str, body: str) -> int:
    engine = ScriptedEngine(CHATML, replies(CALL))
    app: Any = GatewayApp(engine, SessionStore(CHATML), GatewayConfig(auth=False))
    gateway = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=gateway, base_url="http://localhost") as http:
        response = await http.post(f"/v1/messages{path}", content=body)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["type"] == "invalid_request_error"
    return response.status_code


@settings(max_examples=300, deadline=None)
@given(body=_bodies, path=st.sampled_from(["", "/count_tokens"]))
def test_no_request_makes_the_messages_api_fail(body: Any, path: str) -> None:
    async def test() -> None:
        await _post(path, json.dumps(body))

    run(test)


@given(arguments=st.text() | _json.map(json.dumps) | st.dictionaries(st.text(), _json).map(json.dumps))
@example(arguments='{"__raw_arguments__": "north"}')
@example(arguments='{"a": "\\ud800"}')
@example(arguments='{"a": 1e400}')
@example(arguments="{'a': False, 'b': '\\ud800'}")
@example(arguments='{"a":' * 2000 + "1" + "}" * 2000)
def test_any_arguments_survive_the_round_trip(arguments: str) -> None:
    call = ToolCall("look", replace_surrogates(arguments), "t1")
    block = json.loads(msgspec.json.encode(tool_use_block(call, input_json(call))))
    assert isinstance(block["input"], dict)
    (back,) = read_conversation([{"role": "assistant", "content": [block]}])[0].tool_calls
    assert (back.name, back.canonical_arguments, back.id) == (call.name, call.canonical_arguments, call.id)


_deltas = st.lists(
    st.builds(MessageDelta, content=_words)
    | st.builds(MessageDelta, reasoning_content=_words)
    | st.builds(MessageDelta, tool_call=st.builds(ToolCall, st.just("look"), _words, st.just("t1")))
)


@given(batches=st.lists(_deltas))
@example(
    batches=[
        [MessageDelta(reasoning_content="a"), MessageDelta(content="b"), MessageDelta(reasoning_content="c")],
        [MessageDelta(reasoning_content="d")],
    ]
)
def test_any_deltas_become_blocks_that_are_read_back_as_the_message(
    batches: list[list[MessageDelta]],
) -> None:
    deltas = [delta for batch in batches for delta in batch]
    message = Message(
        "assistant",
        "".join(delta.content for delta in deltas),
        reasoning_content="".join(delta.reasoning_content for delta in deltas),
        tool_calls=tuple(delta.tool_call for delta in deltas if delta.tool_call is not None),
        id="msg_1" if any(delta.reasoning_content for delta in deltas) else "",
    )
    done = CallResult("msg_1", as_ids([1, 2, 3]), [Answer(message, "stop", as_ids([1]))], 3, 1)
    stream = MessagesStream(ParsedRequest(CallRequest(Request(()), SamplingParams()), "toy"), "msg_1", CHATML)
    events = events_in(
        b"".join(
            [*(stream.encode_delta(AnswerDelta(0, batch)) for batch in batches), stream.encode_end(done)]
        ).decode()
    )
    assert [event["type"] for event in (events[0], *events[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    for content in (blocks_in(events), json.loads(msgspec.json.encode(write_blocks(message, "msg_1")))):
        (back,) = read_conversation([{"role": "assistant", "content": content}])
        assert (back.content, back.reasoning_content, back.id) == (
            message.content,
            message.reasoning_content,
            message.id,
        )
        assert [call.canonical_arguments for call in back.tool_calls] == [
            call.canonical_arguments for call in message.tool_calls
        ]
        signed = [block for block in content if block["type"] == "thinking"]
        assert all(signed_response_id(block["signature"], block["thinking"]) == "msg_1" for block in signed)


@pytest.mark.parametrize("depth", [20, 200, 500, 800, 900, 940, 960, 980, 5000])
@pytest.mark.parametrize("field", ["input", "content", "schema", "template"])
def test_deeply_nested_body_is_answered_or_refused(depth: int, field: str) -> None:
    async def test() -> None:
        deep = {field: '{"a":' * depth + "1" + "}" * depth}
        documents = '{"type":"document","source":{"type":"content","content":[', "]}}"
        content = documents[0] * (depth // 4) + documents[1] * (depth // 4) if field == "content" else '"p"'
        use = f'{{"type":"tool_use","name":"look","input":{deep.get("input", "{}")}}}'
        turns = f'{{"role":"assistant","content":[{use}]}},{{"role":"user","content":[{content}]}}'
        tools = f'[{{"name":"look","input_schema":{deep.get("schema", "{}")}}}]'
        values = deep.get("template", "{}")
        body = f'{{"messages":[{turns}],"tools":{tools},"chat_template_kwargs":{values}}}'
        assert await _post("", body) == 200 or depth > 20

    run(test)
