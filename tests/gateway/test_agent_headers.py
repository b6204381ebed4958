"""Agents and their parents are read from the headers of known clients."""

from __future__ import annotations

import pytest

from branchline.gateway.model_api import identify_agent
from tests.gateway.harness import agent, run


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
