"""Agents by the headers of the clients that have them."""

from __future__ import annotations

import pytest

from branchline.gateway.agents import Named, named_by
from tests.gateway.running import agent, run


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({}, Named()),
        ({"x-branchline-agent": "critic"}, Named("critic")),
        ({"x-branchline-agent": "critic", "x-branchline-parent-agent": "main"}, Named("critic", "main")),
        ({"x-claude-code-agent-id": "a1"}, Named("a1")),
        ({"x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}, Named("a2", "a1")),
        # The user's own conversation has no name, so that starting a client again starts no other agent.
        ({"session-id": "s1", "thread-id": "s1"}, Named()),
        ({"session-id": "s1", "thread-id": "t2", "x-codex-parent-thread-id": "s1"}, Named("t2", "s1")),
        ({"thread-id": "t2"}, Named()),
        ({"x-session-id": "s1"}, Named()),
        ({"x-session-id": "s2", "x-parent-session-id": "s1"}, Named("s2", "s1")),
        # Our own word goes before a client's.
        ({"x-branchline-agent": "critic", "x-claude-code-agent-id": "a1"}, Named("critic")),
    ],
)
def test_headers_name_an_agent_and_its_parent(headers: dict[str, str], named: Named) -> None:
    assert named_by(headers) == named


def test_a_named_agent_and_its_parent_are_in_the_record() -> None:
    async def main() -> None:
        async with agent("hello") as client:
            thread = {"session-id": "s1", "thread-id": "t2", "x-codex-parent-thread-id": "s1"}
            for headers in ({"session-id": "s1", "thread-id": "s1"}, thread):
                assert (await client.ask("hi", headers=headers)).status_code == 200
            calls = client.session.live.session.tree.calls
            assert [(call.agent, call.spawned_by) for call in calls] == [("", ""), ("t2", "s1")]

    run(main)
