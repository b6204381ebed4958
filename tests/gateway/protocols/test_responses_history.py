"""What a session has said before: whose instructions they were, and whose items come back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.core.call import Call
from branchline.gateway.protocols.responses_input import ResponseHistory, item_id
from branchline.tree.tree import Tree
from tests.gateway.harness import Agent, agent, run
from tests.gateway.protocols.protocol_clients import TOOLS, request, respond

USER = {"role": "user", "content": "p"}
SYSTEM = {"role": "system", "content": "S"}


# -- instructions ------------------------------------------------------------------------------------


def test_instructions_are_omitted_although_another_call_had_them_as_a_message() -> None:
    async def test() -> None:
        async with agent("A1", "A2", "A3") as a:
            await a.ask_text(SYSTEM, USER)
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
            mine = await respond(a, [SYSTEM, USER])
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
        said = Message("assistant", "so", reasoning_content="hm", tool_calls=(ToolCall("look", "{}"),) * 2)
        async with agent(said, "done", codec=ToyCodec.chatml()) as a:
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
    whole: dict[str, Any] = response.json()
    return whole


@pytest.mark.parametrize("given", ["msg_68af", "call_1_2", "fc_call_1", "msg_", "msg_x_y", "odd_aa_0"])
def test_foreign_ids_are_not_recognised(given: str) -> None:
    assert ResponseHistory(Tree()).parse_item_id(given) == ("", "", 0)


def test_generated_ids_of_another_session_group_the_items_of_an_answer() -> None:
    assert ResponseHistory(Tree()).parse_item_id(item_id("fc", "resp_ab12", 3)) == ("fc", "resp_ab12", 3)
