"""Items, tools and response ids of the Responses protocol."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from branchline import Message, ToolCall, ToyCodec
from branchline.core.call import Call
from branchline.core.errors import MessageError
from branchline.core.message import freeform_input
from branchline.gateway.protocols.openai_tools import ToolAlias, read_openai_tools
from branchline.gateway.protocols.responses_input import (
    ItemReader,
    ResponseHistory,
    decode_reasoning,
    encode_reasoning,
    item_id,
)
from branchline.tree.tree import Tree
from tests.gateway.harness import Agent, agent, run
from tests.gateway.protocols.protocol_clients import (
    QUESTIONS,
    SYSTEM,
    TOOLS,
    engine_of,
    parse_events,
    post_responses,
    request,
    respond,
    response_parts,
)

USER = {"role": "user", "content": "p"}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"},
}


def read(*items: Any) -> list[Message]:
    return ItemReader(ResponseHistory(Tree())).read(list(items))


def reasoning_item(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **more}


def message_item(text: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
        **more,
    }


def call_item(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": "{}", "call_id": f"c_{name}", **more}


# -- what becomes one message ------------------------------------------------------------------------


def test_agent_message_is_a_user_message_with_its_encrypted_part() -> None:
    task = {
        "type": "agent_message",
        "author": "/main",
        "recipient": "/main/first",
        "content": [
            {"type": "input_text", "text": "Payload:\n"},
            {"type": "encrypted_content", "encrypted_content": "count the files"},
        ],
    }
    (message,) = read(task)
    assert (message.role, message.content) == ("user", "Payload:\ncount the files")
    assert [message.role for message in read(message_item("hm"), task, call_item("look"))] == [
        "assistant",
        "user",
        "assistant",
    ]


def test_items_of_one_answer_become_one_message() -> None:
    (message,) = read(
        reasoning_item("hm"), message_item("a"), call_item("f"), call_item("g"), message_item("b")
    )
    assert (message.role, message.content, message.reasoning_content) == ("assistant", "ab", "hm")
    assert [(one.name, one.id) for one in message.tool_calls] == [("f", "c_f"), ("g", "c_g")]
    assert message == Message("assistant", "ab", reasoning_content="hm", tool_calls=message.tool_calls)


@pytest.mark.parametrize(
    "items",
    [
        [message_item("a"), reasoning_item("hm"), message_item("b")],
        [message_item("a"), message_item("b")],
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        [message_item("a", id="msg_aa_0"), call_item("f", id="fc_bb_0")],
        [call_item("f"), {"type": "function_call_output", "call_id": "c_f", "output": "x"}, call_item("g")],
        [message_item("a"), USER, message_item("b")],
    ],
)
def test_items_of_two_answers_become_two_messages(items: list[Any]) -> None:
    assert [message.role for message in read(*items)].count("assistant") == 2


def test_response_ids_group_the_items_of_an_answer() -> None:
    (message,) = read(
        message_item("a", id="msg_aa_0"), reasoning_item("hm", id="rs_aa_0"), message_item("b", id="msg_aa_1")
    )
    assert (message.content, message.reasoning_content, message.id) == ("ab", "hm", "resp_aa")


def test_items_of_vendor_servers_are_ignored() -> None:
    odd = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "code_interpreter_call", "code": "1", "container_id": "c"},
        {"type": "compaction", "encrypted_content": "x"},
    ]
    assert read(USER, reasoning_item("hm"), *odd, message_item("a"), *odd) == read(
        USER, reasoning_item("hm"), message_item("a")
    )


def test_an_item_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(MessageError, match=r"input\[1\].type: got 'mesage', expected the type of an item"):
        read(USER, {"type": "mesage", "role": "user", "content": "lost"})


def test_tool_result_is_a_text_or_parts() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}
    text = {"type": "input_text", "text": "seen"}
    plain, parts, mixed = read(
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [text]},
        {"type": "function_call_output", "call_id": "c", "output": [text, image]},
    )
    assert plain == parts == Message("tool", "seen", tool_call_id="c")
    assert (mixed.content, [media.kind for media in mixed.media]) == ("seen", ["image"])


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_encoded_reasoning_is_decoded(text: str) -> None:
    assert decode_reasoning(encode_reasoning(text)) == text


# -- tools -------------------------------------------------------------------------------------------


def test_function_becomes_a_chat_completions_function() -> None:
    schema = {"type": "object"}
    tool = {"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": None}
    chat = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    for given_tool in (tool, {**tool, "defer_loading": True}, chat):
        assert read_openai_tools([given_tool]).tools == [chat]


def test_vendor_server_tools_are_not_offered() -> None:
    odd: list[dict[str, Any]] = [
        {"type": kind}
        for kind in ("web_search", "code_interpreter", "mcp", "image_generation", "tool_search", 7)
    ]
    odd.append({"type": "shell", "environment": {"type": "container_auto"}})
    offered = read_openai_tools(odd)
    assert (offered.tools, offered.aliases) == ([], {})
    assert offered.not_applied == {f"tools.{tool['type']}" for tool in odd}


def test_namespaced_tool_is_offered_under_both_names() -> None:
    inner = [{"type": "function", "name": "read"}, {**PATCH, "name": "edit"}]
    offered = read_openai_tools(
        [
            {"type": "namespace", "name": "mcp__files", "description": "d", "tools": inner},
            {"type": "namespace", "name": "functions", "tools": [{"type": "function", "name": "look"}]},
        ]
    )
    assert [tool["function"]["name"] for tool in offered.tools] == [
        "mcp__files__read",
        "mcp__files__edit",
        "look",
    ]
    assert offered.aliases == {
        "mcp__files__read": ToolAlias("read", "mcp__files"),
        "mcp__files__edit": ToolAlias("edit", "mcp__files", is_freeform=True),
    }


def test_freeform_tool_is_offered_as_a_function_of_one_text() -> None:
    offered = read_openai_tools([PATCH])
    (tool,) = offered.tools
    function = tool["function"]
    assert (function["name"], function["description"]) == ("apply_patch", "Edits files.")
    assert function["parameters"]["required"] == ["input"]
    assert "start: LINE+" in function["parameters"]["properties"]["input"]["description"]
    assert offered.aliases == {"apply_patch": ToolAlias("apply_patch", is_freeform=True)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "arguments",
    ['{"input": "*** Begin\\n+ä"}', '{"patch": "x"}', '{"input": "{\\"a\\": 1}"}', "no JSON", "[1]"],
)
def test_freeform_call_is_a_text_for_any_arguments_of_the_model(arguments: str, stream: bool) -> None:
    async def test() -> None:
        reply = Message("assistant", "", tool_calls=(ToolCall("apply_patch", arguments),))
        async with agent(reply, "done", codec=ToyCodec.chatml()) as a:
            response = await respond(a, [USER], tools=[PATCH], stream=stream)
            (item,) = response["output"]
            assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
            assert item["input"] == freeform_input(arguments)
            result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
            await respond(a, [USER, item, result], tools=[PATCH])
            (line,) = await a.timelines()
            assert len(line["calls"]) == 2
            assert not a.session.managed.session.tree.calls[1].applied_equivalences

    run(test)


def test_freeform_call_without_its_id_is_matched_by_input() -> None:
    async def test() -> None:
        reply = Message("assistant", "", tool_calls=(ToolCall("apply_patch", '{"input": "x"}'),))
        async with agent(reply, "done", codec=ToyCodec.chatml()) as a:
            (item,) = (await respond(a, [USER], tools=[PATCH]))["output"]
            del item["id"]
            result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
            await respond(a, [USER, item, result], tools=[PATCH])
            assert len(await a.timelines()) == 1

    run(test)


def test_freeform_call_is_streamed_as_its_input() -> None:
    async def test() -> None:
        reply = Message("assistant", "", tool_calls=(ToolCall("apply_patch", '{"input": "x\\ny"}'),))
        async with agent(reply, codec=ToyCodec.chatml()) as a:
            events = parse_events((await post_responses(a, "p", tools=[PATCH], stream=True)).text)
            call_events = [event for event in events if "custom_tool_call_input" in event["type"]]
            assert [event["type"].rpartition(".")[2] for event in call_events] == ["delta", "done"]
            assert (call_events[0]["delta"], call_events[1]["input"]) == ("x\ny", "x\ny")

    run(test)


def test_call_of_a_namespaced_tool_has_the_namespace() -> None:
    async def test() -> None:
        tools = [{"type": "namespace", "name": "mcp__files", "tools": [{"type": "function", "name": "read"}]}]
        reply = Message("assistant", "", tool_calls=(ToolCall("mcp__files__read", "{}"),))
        async with agent(reply, "done", codec=ToyCodec.chatml()) as a:
            (item,) = (await respond(a, [USER], tools=tools))["output"]
            assert (item["name"], item["namespace"]) == ("read", "mcp__files")
            result = {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
            await respond(a, [USER, item, result], tools=tools)
            (line,) = await a.timelines()
            assert len(line["calls"]) == 2

    run(test)


def test_additional_tools_item_adds_tools_that_none_hides() -> None:
    async def test() -> None:
        async with agent("ok") as a:
            await respond(a, [USER], tools=TOOLS)
            await respond(a, [{"type": "additional_tools", "role": "developer", "tools": TOOLS}, USER])
            await respond(a, [USER], tools=TOOLS, tool_choice="none")
            shown, as_item, hidden = a.prompts()
            assert shown == as_item
            assert hidden == "user:p\nassistant:"

    run(test)


def test_parallel_tool_calls_false_gives_one_call() -> None:
    async def test() -> None:
        both = Message("assistant", "", tool_calls=(ToolCall("look", "{}"), ToolCall("look", '{"at": 2}')))
        async with agent(both, codec=ToyCodec.chatml()) as a:
            for stream in (False, True):
                response = await respond(a, "p", tools=TOOLS, parallel_tool_calls=False, stream=stream)
                assert response_parts(response)[2] == ["look {}"]

    run(test)


def test_item_reference_stands_for_the_item() -> None:
    async def test() -> None:
        reply = Message("assistant", "so", reasoning_content="hm", tool_calls=(ToolCall("look", "{}"),))
        async with agent(reply, "done", codec=ToyCodec.chatml()) as a:
            output = (await respond(a, [USER], tools=TOOLS))["output"]
            references = [{"type": "item_reference", "id": item["id"]} for item in output]
            result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "ok"}
            await respond(a, [USER, *references, result], tools=TOOLS)
            (line,) = await a.timelines()
            assert len(line["calls"]) == 2
            assert not a.session.managed.session.tree.calls[1].applied_equivalences

    run(test)


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ([1], "body"),
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": ["p"]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": 7}]}, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "odd"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": 7}]}, "input[0].arguments"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "input": 7}]}, "input[0].input"),
        ({"input": [{"type": "function_call_output", "output": 7}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "output": [{}]}]}, "input[0].output[0].type"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "content": [{"text": 1}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"type": "additional_tools", "tools": 7}]}, "input[0].tools"),
        ({"input": "p", "instructions": ["x"]}, "instructions"),
        ({"input": "p", "tools": {}}, "tools"),
        ({"input": "p", "tools": [7]}, "tools[0]"),
        ({"input": "p", "tools": [{"type": "function"}]}, "tools[0].name"),
        (
            {"input": "p", "tools": [{"type": "function", "name": "f", "parameters": 7}]},
            "tools[0].parameters",
        ),
        ({"input": "p", "tools": [{"type": "namespace", "name": "n", "tools": [7]}]}, "tools[0].tools[0]"),
        ({"input": "p", "tool_choice": "often"}, "tool_choice"),
        ({"input": "p", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "p", "temperature": "hot"}, "temperature"),
        ({"input": "p", "stream": "yes"}, "stream"),
        ({"input": "p", "background": True}, "background"),
        ({"input": "p", "conversation": "conv_1"}, "conversation"),
        ({"input": "p", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": "p", "text": "plain"}, "text"),
        ({"input": "p", "text": {"format": 7}}, "text.format"),
        ({"input": "p", "metadata": 7}, "metadata"),
        ({"input": "p", "reasoning": "hard"}, "reasoning"),
        ({"input": "p", "include": "all"}, "include"),
    ],
)
def test_wrong_input_is_400_with_the_field_named(body: Any, field: str) -> None:
    async def test() -> None:
        async with agent("ok") as a:
            response = await a.http.post(
                f"{a.session.base_url}/responses",
                json=body,
                headers={"authorization": f"Bearer {a.session.api_key}"},
            )
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", field)
            assert not a.engine.received_prompts

    run(test)


def test_text_model_refuses_images_in_any_item() -> None:
    async def test() -> None:
        engine, codec = engine_of("qwen3")
        image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
        call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c"}
        user = {"role": "user", "content": QUESTIONS[0]}
        async with agent(engine=engine, codec=codec) as a:
            for items in (
                [{"role": "user", "content": [{"type": "input_text", "text": "see"}, image]}],
                [user, call, {"type": "function_call_output", "call_id": "c", "output": [image]}],
            ):
                refused = await post_responses(a, items, instructions=SYSTEM, stream=True)
                assert refused.status_code == 400
                assert "image" in refused.json()["error"]["message"]
            assert not engine.received_prompts

    run(test)


def test_deeply_nested_body_is_accepted_or_refused() -> None:
    async def test() -> None:
        async with agent("ok") as a:
            url, headers = (
                f"{a.session.base_url}/responses",
                {"authorization": f"Bearer {a.session.api_key}"},
            )
            seen = set()
            for depth in range(100, 1200, 50):
                deep = '{"a":' * depth + "1" + "}" * depth
                for body in (
                    '{"input":"p","metadata":%s}',
                    '{"input":"p","tools":[{"type":"function","name":"f","parameters":%s}]}',
                    '{"input":[{"type":"function_call","name":"f","arguments":%s}]}',
                    '{"input":"p","chat_template_kwargs":%s}',
                ):
                    response = await a.http.post(url, content=body % deep, headers=headers)
                    seen.add(response.status_code)
            assert seen == {200, 400}

    run(test)


ids = st.sampled_from(["msg_aa_0", "rs_aa_0", "fc_aa_9", "ctc_aa_0", "msg_bb_0", "mine", ""])
texts = st.text(max_size=4) | ids | st.just("branchline:x")
json_scraps: st.SearchStrategy[Any] = st.recursive(
    st.none() | texts | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)


def valid_items(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Valid items of a kind, with some fields omitted or null."""
    known = {name: value for name, value in fields.items() if name in ("role", "name", "output")}
    rest = {name: value | st.none() for name, value in fields.items() if name not in known}
    return st.fixed_dictionaries({"type": st.just(kind), **known}, optional={"id": ids, **rest})


text_parts = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text"]), "text": texts})
    | st.fixed_dictionaries({"type": st.just("refusal"), "refusal": texts})
    | st.just({"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}),
    max_size=3,
)
content = texts | text_parts
text_entries = st.lists(st.fixed_dictionaries({"text": texts}), max_size=2)
names = st.sampled_from(["look", "apply_patch"])
valid_item_strategy = st.one_of(
    valid_items(
        "message", role=st.sampled_from(["user", "assistant", "system", "developer"]), content=content
    ),
    valid_items("reasoning", summary=text_entries, content=text_entries, encrypted_content=texts),
    valid_items("function_call", name=names, arguments=texts, call_id=ids, namespace=texts),
    valid_items("custom_tool_call", name=names, input=texts, call_id=ids),
    valid_items("function_call_output", output=content, call_id=ids),
    valid_items("custom_tool_call_output", output=content, call_id=ids),
    valid_items("additional_tools", tools=st.just([*TOOLS, PATCH])),
    valid_items("web_search_call", action=json_scraps),
)
fields = st.sampled_from(["type", "role", "content", "summary", "name", "arguments", "input", "output", "id"])
odd_items = json_scraps | st.builds(
    lambda item, field, scrap: {**item, field: scrap}, valid_item_strategy, fields, json_scraps
)
bodies = st.fixed_dictionaries(
    {
        "input": st.lists(valid_item_strategy, max_size=6)
        | st.lists(valid_item_strategy | odd_items, max_size=3)
        | texts
    },
    optional={
        "tools": st.lists(st.sampled_from([*TOOLS, PATCH, {"type": "odd"}]), max_size=2),
        "instructions": texts,
        "include": st.just(["reasoning.encrypted_content"]),
        "reasoning": st.fixed_dictionaries({}, optional={"summary": texts}),
        "stream": st.booleans(),
    },
)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.lists(bodies, min_size=20, max_size=20))
def test_any_input_is_answered_or_refused_by_name(sent: list[Any]) -> None:
    async def test() -> None:
        async with agent("ok", codec=ToyCodec.chatml()) as a:
            for body in sent:
                response = await a.http.post(
                    f"{a.session.base_url}/responses",
                    content=json.dumps(body),
                    headers={"authorization": f"Bearer {a.session.api_key}"},
                )
                assert response.status_code in (200, 400), response.text
                if response.status_code == 400:
                    assert response.json()["error"]["param"].startswith("input")
                elif body.get("stream"):
                    assert parse_events(response.text)[-1]["type"] == "response.completed"
                else:
                    assert response.json()["status"] == "completed"

    run(test)


# -- response ids ------------------------------------------------------------------------------------

SYSTEM_MESSAGE = {"role": "system", "content": "S"}


# -- instructions ------------------------------------------------------------------------------------


def test_instructions_are_omitted_although_another_call_had_them_as_a_message() -> None:
    async def test() -> None:
        async with agent("A1", "A2", "A3") as a:
            await a.ask_text(SYSTEM_MESSAGE, USER)
            mine = await respond(a, "q", instructions="S")
            await respond(a, "x", instructions="S", previous_response_id=mine["id"])
            assert a.prompts()[-1] == "system:S\nuser:q\nassistant:A2user:x\nassistant:"
            await respond(a, "x", previous_response_id=mine["id"])
            assert a.prompts()[-1] == "user:q\nassistant:A2user:x\nassistant:"

    run(test)


def test_message_stays_although_another_call_had_it_as_instructions() -> None:
    async def test() -> None:
        async with agent("A1", "A2", "A3") as a:
            await respond(a, "p", instructions="S")
            mine = await respond(a, [SYSTEM_MESSAGE, USER])
            await respond(a, "x", previous_response_id=mine["id"])
            assert a.prompts()[-1] == "system:S\nuser:p\nassistant:A2user:x\nassistant:"

    run(test)


def test_call_without_the_instructions_field_had_none() -> None:
    call = Call(0, "resp_1", "", 1, (2,), 3, has_instructions=True)
    fields = msgspec.to_builtins(call)
    assert msgspec.convert(fields, Call).has_instructions
    assert not msgspec.convert(fields[:-1], Call).has_instructions


# -- items -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "turn-1", "turn_1", "a.b-c", "resp_x", "abc123"])
@pytest.mark.parametrize("by_id", [False, True])
def test_items_of_a_named_call_are_recognised(name: str, by_id: bool) -> None:
    async def test() -> None:
        reply = Message("assistant", "so", reasoning_content="hm", tool_calls=(ToolCall("look", "{}"),) * 2)
        async with agent(reply, "done", codec=ToyCodec.chatml()) as a:
            first = await _named(a, name, [USER])
            output = first["output"]
            assert first["id"] == name or not name
            items = [{"type": "item_reference", "id": item["id"]} for item in output] if by_id else output
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
                for item in output[-2:]
            ]
            await respond(a, [USER, *items, *results], tools=TOOLS)
            (line,) = await a.timelines()
            assert len(line["calls"]) == 2
            assert not a.session.managed.session.tree.calls[1].applied_equivalences

    run(test)


async def _named(a: Agent, name: str, items: Any) -> dict[str, Any]:
    sent = request(a, "responses", "", input=items, tools=TOOLS)
    if name:
        sent.headers["x-branchline-call"] = name
    response = await a.http.send(sent)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@pytest.mark.parametrize("id", ["msg_68af", "call_1_2", "fc_call_1", "msg_", "msg_x_y", "odd_aa_0"])
def test_foreign_ids_are_not_recognised(id: str) -> None:
    assert ResponseHistory(Tree()).parse_item_id(id) == ("", "", 0)


def test_generated_ids_of_another_session_group_the_items_of_an_answer() -> None:
    assert ResponseHistory(Tree()).parse_item_id(item_id("fc", "resp_ab12", 3)) == ("fc", "resp_ab12", 3)
