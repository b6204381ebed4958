"""The gateway warns once of sessions whose agents have other system prompts and no names."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.gateway.harness import agent, run


def test_the_first_session_with_unnamed_agents_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("branchline.gateway.logs._warned_of_names", [])

    def asked(system: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": system}, {"role": "user", "content": "Count the files."}]

    async def test() -> None:
        for _ in range(2):
            async with agent("three", "It is right.") as a:
                await a.ask_text(*asked("You count."))
                assert (await a.get("/report"))["unnamed_conversations"] == 0
                await a.ask_text(*asked("You judge."))
                assert (await a.get("/report"))["unnamed_conversations"] == 1
                trajectory = a.session.managed.trajectory()
                assert (trajectory.answer, trajectory.fork_causes) == ("three", {"other_system_prompt": 1})
                await a.session.finalize()

    with caplog.at_level(logging.WARNING, logger="branchline.sessions"):
        run(test)
    (warning,) = [entry.getMessage() for entry in caplog.records if "no agent name" in entry.getMessage()]
    assert "1 conversations beside the first" in warning
