"""Vendors' own tools that a client runs: the model is shown what they take, the client gets its own items."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.gateway.protocols.openai_tools import read_openai_tools
from branchline.gateway.protocols.vendor_tools import OPENAI_TOOLS, anthropic_tool
from tests.gateway.harness import agent, run
from tests.gateway.protocols.messages_client import messages_client
from tests.gateway.protocols.protocol_clients import respond

USER = {"role": "user", "content": "p"}
streamed = pytest.mark.parametrize("stream", [False, True])


# -- Anthropic's -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "input"),
    [
        ({"type": "bash_20250124", "name": "bash"}, {"command": "ls"}),
        ({"type": "bash_20241022", "name": "bash"}, {"restart": True}),
        (
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
            {"command": "view", "path": "/x", "view_range": [1, 2]},
        ),
        (
            {"type": "memory_20250818", "name": "memory"},
            {"command": "rename", "old_path": "a", "new_path": "b"},
        ),
    ],
)
def test_client_tool_is_shown_with_its_schema(tool: dict[str, Any], input: dict[str, Any]) -> None:
    async def test() -> None:
        reply = Message("assistant", tool_calls=(ToolCall(tool["name"], json.dumps(input)),))
        async with messages_client(reply, "done", codec=ToyCodec.chatml()) as c:
            answer = await c.ask("p", tools=[tool])
            (block,) = answer["content"]
            assert (block["name"], block["input"]) == (tool["name"], input)
            shown = json.loads(c.prompts()[0].split("\n")[0].removeprefix("tools:"))[0][0]["function"]
            assert shown["name"] == tool["name"]
            assert set(input) <= set(shown["parameters"]["properties"])
            result = {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
            await c.ask("p", answer["content"], [result], tools=[tool])
            assert [len(calls) for calls in await c.calls()] == [2]

    run(test)


def test_anthropic_server_tool_is_not_shown() -> None:
    assert [anthropic_tool(kind) for kind in ("web_search_20250305", "computer_20250124", "bash", "x_1")] == [
        None
    ] * 4


# -- OpenAI's ----------------------------------------------------------------------------------------

WRITTEN = {
    "local_shell": ('{"command": ["ls", "-l"]}', {"type": "exec", "command": ["ls", "-l"], "env": {}}),
    "shell": ('{"commands": ["ls"], "timeout_ms": 5}', {"commands": ["ls"], "timeout_ms": 5}),
    "apply_patch": (
        '{"type": "delete_file",  "path": "x"}',
        {"type": "delete_file", "path": "x"},
    ),
}
ODD = {
    "local_shell": ('{"command": "ls -l"}', {"type": "exec", "command": ['{"command": "ls -l"}'], "env": {}}),
    "shell": ("ls -l", {"commands": ["ls -l"]}),
    "apply_patch": ("*** Begin", {"type": "update_file", "path": "", "diff": "*** Begin"}),
}
OUTPUTS: dict[str, Any] = {
    "local_shell": lambda call: {"type": "local_shell_call_output", "id": call["call_id"], "output": "{}"},
    "shell": lambda call: {
        "type": "shell_call_output",
        "call_id": call["call_id"],
        "output": [{"stdout": "x", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    "apply_patch": lambda call: {
        "type": "apply_patch_call_output",
        "call_id": call["call_id"],
        "status": "completed",
    },
}


@pytest.mark.parametrize("kind", OPENAI_TOOLS)
@pytest.mark.parametrize("written", [WRITTEN, ODD], ids=["well", "oddly"])
@streamed
def test_vendor_call_item_is_read_back_as_sampled(kind: str, written: Any, stream: bool) -> None:
    arguments, shown = written[kind]

    async def test() -> None:
        reply = Message("assistant", tool_calls=(ToolCall(kind, arguments),))
        async with agent(reply, "done", codec=ToyCodec.chatml()) as a:
            tools = [{"type": kind}]
            (call,) = (await respond(a, [USER], tools=tools, stream=stream))["output"]
            assert (call["type"], call["status"]) == (f"{kind}_call", "completed")
            assert call[OPENAI_TOOLS[kind].arguments_field] == shown
            # Clients write null for absent fields.
            call = {**call, OPENAI_TOOLS[kind].arguments_field: {**shown, "user": None}}
            await respond(a, [USER, call, OUTPUTS[kind](call)], tools=tools)
            (line,) = await a.timelines()
            assert len(line["calls"]) == 2
            tree = a.session.managed.session.tree
            roles = [node.message.role for node in tree.nodes[tree.calls[1].outputs[0]].path()]
            assert roles == ["user", "assistant", "tool", "assistant"]
            assert not tree.calls[1].applied_equivalences

    run(test)


@pytest.mark.parametrize("kind", OPENAI_TOOLS)
def test_vendor_call_without_its_id_is_matched_by_content(kind: str) -> None:
    async def test() -> None:
        reply = Message("assistant", tool_calls=(ToolCall(kind, WRITTEN[kind][0]),))
        async with agent(reply, "done", codec=ToyCodec.chatml()) as a:
            (call,) = (await respond(a, [USER], tools=[{"type": kind}]))["output"]
            del call["id"]
            await respond(a, [USER, call, OUTPUTS[kind](call)], tools=[{"type": kind}])
            assert len(await a.timelines()) == 1

    run(test)


def test_openai_sdk_reads_vendor_call_items() -> None:
    async def test() -> None:
        reply = Message(
            "assistant", tool_calls=tuple(ToolCall(kind, WRITTEN[kind][0]) for kind in OPENAI_TOOLS)
        )
        async with (
            agent(reply, codec=ToyCodec.chatml()) as a,
            openai.AsyncOpenAI(base_url=a.session.base_url, api_key=a.session.api_key) as sdk,
            sdk.responses.stream(
                model="m",
                input="q",
                tools=[{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}],
            ) as stream,
        ):
            response = await stream.get_final_response()
            shell, commands, patch = response.output
            assert shell.type == "local_shell_call"
            assert shell.action.command == ["ls", "-l"]
            assert commands.type == "shell_call"
            assert commands.action.commands == ["ls"]
            assert patch.type == "apply_patch_call"
            assert patch.operation.path == "x"

    run(test)


def test_hosted_shell_is_not_offered() -> None:
    local, hosted = {"type": "local"}, {"type": "container_auto"}
    assert [
        len(read_openai_tools([{"type": "shell", "environment": environment}]).tools)
        for environment in (None, local, hosted)
    ] == [
        1,
        1,
        0,
    ]


@pytest.mark.parametrize("kind", OPENAI_TOOLS)
def test_vendor_item_without_arguments_is_refused_by_name(kind: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            body = {"model": "m", "input": [USER, {"type": f"{kind}_call", "call_id": "c"}]}
            key = {"authorization": f"Bearer {a.session.api_key}"}
            refused = await a.http.post(f"{a.session.base_url}/responses", json=body, headers=key)
            assert (refused.status_code, refused.json()["error"]["param"]) == (
                400,
                f"input[1].{OPENAI_TOOLS[kind].arguments_field}",
            )

    run(test)
