"""Content blocks of every type; appended turns stay one timeline."""

from __future__ import annotations

import base64
from typing import Any

import anthropic
import pytest

from branchline import ToyCodec
from tests.chat.families import load_codec
from tests.gateway.harness import run
from tests.gateway.protocols.messages_client import CALL, TOOLS, messages_client, text, tool_results

CHATML = ToyCodec.chatml()
PIXELS = b"\x89PNG pixels"
IMAGE: dict[str, Any] = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PIXELS).decode()},
}
EPHEMERAL = {"type": "ephemeral"}


# -- one timeline ------------------------------------------------------------------------------------


def test_moving_cache_control_changes_nothing() -> None:
    async def test() -> None:
        async with messages_client(CALL, "done", "again", codec=CHATML) as c:
            system = [text("You help.", cache_control=EPHEMERAL), text(" Well.")]
            first = await c.ask([text("a"), text("b", cache_control=EPHEMERAL)], system=system, tools=TOOLS)
            system = [text("You help."), text(" Well.", cache_control=EPHEMERAL)]
            tools = [{**TOOLS[0], "cache_control": EPHEMERAL}]
            found = [{**tool_results(first, "x")[0], "cache_control": EPHEMERAL, "is_error": False}]
            second = await c.ask([text("a"), text("b")], first["content"], found, system=system, tools=tools)
            # Once they carry no mark, some clients write texts as plain strings again.
            turns = [
                "ab",
                first["content"],
                [{**found[0], "content": [text("x")]}],
                second["content"],
                "more",
            ]
            await c.ask(*turns, system="You help. Well.", tools=TOOLS, cache_control=EPHEMERAL)
            assert [len(line) for line in await c.calls()] == [3]

    run(test)


def test_billing_lines_are_not_shown_to_the_model() -> None:
    async def test() -> None:
        async with messages_client("A") as c:
            for number in range(3):
                bill = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number};"
                await c.ask("p", *["A", "q"][: 2 * number], system=[text(bill), text("You help.")])
            await c.ask("p", "A", "q", system="x-anthropic-billing-header: cch=9\nYou help.")
            assert c.prompts()[0] == "system:You help.\nuser:p\nassistant:"
            assert c.prompts()[1] == c.prompts()[2] == c.prompts()[3]
            await c.ask("p", system=[text("x-anthropic-billing-header: cch=1;")])
            await c.ask("p", system="")
            assert c.prompts()[4] == c.prompts()[5] == "user:p\nassistant:"

    run(test)


def test_system_message_between_turns_keeps_its_position() -> None:
    async def test() -> None:
        async with messages_client("A", "B", "C") as c:
            begin: list[Any] = [
                {"role": "user", "content": [text("<system-reminder>date</system-reminder>"), text("p")]},
                {"role": "system", "content": "Available agents: none"},
            ]
            await c.ask(*begin, system="s")
            more = [*begin, {"role": "assistant", "content": "A"}, {"role": "user", "content": "q"}]
            await c.ask(*more, {"role": "system", "content": [text("New agents: one")]}, system="s")
            last = [
                *more,
                {"role": "system", "content": "New agents: one"},
                {"role": "assistant", "content": "B"},
            ]
            await c.ask(*last, {"role": "user", "content": "r"}, system="s")
            assert [len(line) for line in await c.calls()] == [3]
            assert c.prompts()[-1] == (
                "system:s\nuser:<system-reminder>date</system-reminder>p\nsystem:Available agents: none\n"
                "assistant:Auser:q\nsystem:New agents: one\nassistant:Buser:r\nassistant:"
            )

    run(test)


def test_trailing_assistant_message_is_context() -> None:
    async def test() -> None:
        async with messages_client("ok", "ok") as c:
            assert (await c.ask("p", "It starts with"))["content"] == [text("ok")]
            assert c.prompts() == ["user:p\nassistant:It starts with\nassistant:"]
            (line,) = await c.client.timelines()
            assert sum(line["mask"]) == len("ok")

    run(test)


def test_sub_agent_of_claude_code_is_a_separate_agent() -> None:
    async def test() -> None:
        async with messages_client("A") as c:
            body = {"model": "haiku", "max_tokens": 9, "messages": [{"role": "user", "content": "p"}]}
            names = {"x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}
            for headers in ({}, {"x-claude-code-agent-id": "a1"}, names):
                assert (await c.post(body, "?beta=true", headers)).status_code == 200
            assert [line["agent"] for line in await c.client.timelines()] == [None, "a1", "a2"]
            assert [call.spawned_by for call in c.client.session.managed.session.tree.calls] == ["", "", "a1"]

    run(test)


def test_unsupported_fields_are_ignored() -> None:
    async def test() -> None:
        async with messages_client("A") as c:
            options = {
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "metadata": {"user_id": "{}"},
                "betas": ["context-1m-2025-08-07"],
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "output_config": {"effort": "high"},
                "service_tier": "auto",
                "container": None,
                "inference_geo": "moon",
                "top_k": -1,
                "stop_sequences": None,
            }
            beta = c.sdk.beta.messages
            answer = await beta.create(
                model="toy", max_tokens=9, messages=[{"role": "user", "content": "p"}], betas=["x"]
            )
            assert answer.content[0].text == "A"  # type: ignore[union-attr]
            await c.ask("p", **options)
            await c.ask("p", tools=[], **options)
            assert set(c.prompts()) == {"user:p\nassistant:"}
            await c.ask("p", chat_template_kwargs={"enable_thinking": False})
            assert "enable_thinking" in c.prompts()[-1]

    run(test)


# -- kinds of blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        (text("words"), "words"),
        ("words", "words"),
        ({"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}}, ""),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s1",
                "content": [{"type": "web_search_result"}],
            },
            "",
        ),
        ({"type": "web_search_tool_result", "tool_use_id": "s1", "content": {"error_code": "x"}}, ""),
        ({"type": "mcp_tool_use", "id": "m1", "name": "n", "server_name": "s", "input": {}}, ""),
        ({"type": "mcp_tool_result", "tool_use_id": "m1", "content": [text("found")]}, "found"),
        ({"type": "redacted_thinking", "data": "c2VjcmV0"}, ""),
        ({"type": "container_upload", "file_id": "f1"}, ""),
        ({"type": "compaction", "content": "a summary"}, "a summary"),
        ({"type": "not_yet_invented", "text": "words", "content": 7}, "words"),
        (
            {"type": "search_result", "source": "u", "title": "t", "content": [text("one "), text("two")]},
            "one two",
        ),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "doc"}}, "doc"),
        (
            {
                "type": "document",
                "title": "T",
                "context": "C",
                "source": {"type": "content", "content": "doc"},
            },
            "T\nC\ndoc",
        ),
        ({"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}, "ab"),
    ],
    ids=lambda value: value.get("type", "") if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("position", ["user", "tool_result", "assistant", "system"])
def test_unknown_block_gives_its_text_in_any_position(block: Any, shown: str, position: str) -> None:
    async def test() -> None:
        async with messages_client("A") as c:
            if position == "user":
                await c.ask([block])
                expected = f"user:{shown}\n"
            elif position == "tool_result":
                await c.ask([{"type": "tool_result", "tool_use_id": "t", "content": [block]}])
                expected = f"tool:{shown}\n"
            elif position == "assistant":
                await c.ask("p", [block], "q")
                expected = f"user:p\nassistant:{shown}\nuser:q\n"
            else:
                await c.ask("p", system=[block])
                expected = f"system:{shown}\nuser:p\n" if shown else "user:p\n"
            assert c.prompts() == [f"{expected}assistant:"]

    run(test)


def test_tool_results_are_separate_messages_before_the_users_text() -> None:
    async def test() -> None:
        async with messages_client("A") as c:
            uses = [{"type": "tool_use", "id": f"t{n}", "name": "look", "input": {"at": n}} for n in range(4)]
            found = [
                {"type": "tool_result", "tool_use_id": "t0", "content": "zero"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [text("o"), text("ne")]},
                text("and?"),
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3"},
            ]
            await c.ask("p", [text("hm"), *uses], found)
            assert c.prompts()[0].endswith(
                "}</call>\ntool:zero\ntool:one\ntool:error\ntool:\nuser:and?\nassistant:"
            )
            nodes = c.client.session.managed.session.tree.nodes
            assert [node.message.tool_call_id for node in nodes if node.message.role == "tool"] == [
                "t0",
                "t1",
                "t2",
                "t3",
            ]

    run(test)


def test_media_equal_those_of_chat_completions() -> None:
    async def test() -> None:
        async with messages_client("A") as c:
            link = {"type": "image", "source": {"type": "url", "url": "https://images.test/a.png"}}
            await c.ask([text("see"), IMAGE, link])
            data = base64.b64encode(PIXELS).decode()
            parts = [
                text("see"),
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                {"type": "image_url", "image_url": {"url": "https://images.test/a.png"}},
            ]
            await c.client.ask_text({"role": "user", "content": parts})
            assert c.prompts()[0] == c.prompts()[1]
            one, two = (
                node
                for node in c.client.session.managed.session.tree.nodes
                if node.message.role == "assistant"
            )
            assert one.parent is two.parent
            assert one.parent is not None
            assert one.parent.message.media[0].payload == PIXELS

    run(test)


def test_text_model_refuses_images() -> None:
    codec = load_codec("qwen3")

    async def test() -> None:
        async with messages_client("A", codec=codec) as c:
            with pytest.raises(anthropic.BadRequestError, match="image"):
                await c.sdk.messages.create(
                    model="toy",
                    max_tokens=9,
                    messages=[{"role": "user", "content": [IMAGE]}],  # type: ignore
                )
            found = [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]
            error = await c.refusal({"messages": [{"role": "user", "content": found}]})
            assert "image" in error["message"]

    run(test)


def test_tools_of_anthropics_servers_are_ignored() -> None:
    async def test() -> None:
        async with messages_client("A") as c:
            server = [
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
                {"type": "computer_20250124", "name": "computer", "display_width_px": 1024},
                {"type": "mcp_toolset", "mcp_server_name": "s"},
            ]
            await c.ask("p", tools=[*server, *TOOLS, {"type": "custom", "name": "hear", "input_schema": {}}])
            await c.ask("p", tools=server)
            await c.ask("p")
            assert c.prompts()[0].count('"function": {') == 2
            assert c.prompts()[1] == c.prompts()[2] == "user:p\nassistant:"

    run(test)
