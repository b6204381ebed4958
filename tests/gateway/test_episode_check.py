"""A second, unrelated conversation in a shared session is warned about once; what belongs to one is not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from branchline.gateway.config import GatewayConfig
from branchline.gateway.episode_check import EpisodeCheck
from tests.gateway.harness import agent, run

SYSTEM = {"role": "system", "content": "You are an agent."}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
TASK = "Find the oldest file in the folder and print its name."
OTHER_TASK = "Write a poem about a lighthouse in winter."
SUMMARY = "The folder has three files; the oldest one is a.txt, which was not printed yet."


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


Call = tuple[Sequence[Any], dict[str, Any]]


def call(*messages: Any, **body: Any) -> Call:
    return messages, body


async def check_is_over(check: EpisodeCheck) -> None:
    while check._running:
        await asyncio.sleep(0.001)


def warnings_for(calls: Sequence[Call], caplog: pytest.LogCaptureFixture, *, watch: bool = True) -> list[str]:
    """The warnings after these calls in one session, each answered with `reply`."""

    async def test() -> None:
        async with agent(*["reply", SUMMARY, *["reply"] * 30]) as a:
            check = a.gateway.app.episode_check
            if watch:
                check.watch(a.session.id)
            for messages, body in calls:
                await a.ask_text(*messages, **body)
                await check_is_over(check)

    with caplog.at_level(logging.WARNING, "branchline.sessions"):
        run(test)
    return [line for line in caplog.messages if "nothing to do with" in line]


def turns(task: str, *, system: bool, **body: Any) -> list[Call]:
    """Two turns of one conversation."""
    start = [*([SYSTEM] if system else []), user(task)]
    return [call(*start, **body), call(*start, assistant("reply"), user("go on"), **body)]


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("body", [{}, {"tools": TOOLS}], ids=["plain", "tools"])
def test_second_task_is_warned_about_once(
    system: bool, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    start = [SYSTEM] if system else []
    calls = [
        call(*start, user(TASK), **body),
        call(*start, user(OTHER_TASK), **body),
        call(*start, user("Translate this sentence."), **body),
    ]
    (line,) = warnings_for(calls, caplog)
    assert "A session is one episode" in line
    assert "POST /sessions" in line


@pytest.mark.parametrize("system", [False, True])
def test_second_task_with_the_same_frame_is_noticed_after_a_longer_conversation(
    system: bool, caplog: pytest.LogCaptureFixture
) -> None:
    frame = "Solve the following problem step by step, and put the answer into a box: "
    start = [SYSTEM] if system else []
    first = [
        call(*start, user(f"{frame}1 + 1")),
        call(*start, user(f"{frame}1 + 1"), assistant("reply"), user("go on")),
    ]
    assert len(warnings_for([*first, call(*start, user(f"{frame}2 + 7"))], caplog)) == 1


def test_session_of_a_program_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings_for([call(user(TASK)), call(user(OTHER_TASK))], caplog, watch=False)


def test_default_session_of_a_gateway_without_keys_is_checked(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with agent("x", "y", config=GatewayConfig(auth=False)) as a:
            for task in (TASK, OTHER_TASK):
                body = {"messages": [user(task)]}
                await a.http.post(f"{a.gateway.url}/v1/chat/completions", json=body)
            await check_is_over(a.gateway.app.episode_check)

    with caplog.at_level(logging.WARNING, "branchline.sessions"):
        run(test)
    assert ["session default: call" in line for line in caplog.messages] == [True]


TITLE = {"role": "system", "content": "Write a title of at most five words for the conversation."}
SCENARIOS: dict[str, list[Call]] = {
    "one conversation": turns(TASK, system=True),
    "title, before the work": [
        call(TITLE, user(TASK)),
        *turns(TASK, system=True, tools=TOOLS),
    ],
    "title, after the work": [*turns(TASK, system=True, tools=TOOLS), call(TITLE, user(TASK))],
    "title without a system prompt": [
        call(user(f"Write a title for this:\n{TASK}")),
        *turns(TASK, system=False, tools=TOOLS),
    ],
    "topic check of every message": [
        *turns(TASK, system=True, tools=TOOLS),
        call(user(f"Is this a new topic? {TASK}")),
        call(user("Is this a new topic? go on")),
    ],
    "best of n": [call(SYSTEM, user(TASK)), call(SYSTEM, user(TASK)), call(SYSTEM, user(TASK))],
    "compaction": [
        call(SYSTEM, user(TASK), tools=TOOLS),
        call(SYSTEM, user(TASK), assistant("reply"), user("Summarise the conversation."), tools=TOOLS),
        call(SYSTEM, user(f"Continue from this summary:\n{SUMMARY}"), tools=TOOLS),
    ],
    "edited first message": [
        call(SYSTEM, user(TASK)),
        call(SYSTEM, user(TASK.replace("oldest", "newest"))),
    ],
    "critic under its own system prompt": [
        *turns(TASK, system=True),
        call({"role": "system", "content": "You are a critic."}, user("Is 'reply' a good answer?")),
    ],
    "other tools": [call(SYSTEM, user(TASK), tools=TOOLS), call(SYSTEM, user(TASK))],
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_belongs_to_one_episode_is_not_warned_about(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings_for(SCENARIOS[name], caplog)


def test_named_agents_are_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    calls = [call(SYSTEM, user(TASK), user_name="a"), call(SYSTEM, user(OTHER_TASK), user_name="b")]
    named = [(messages, {"user": body["user_name"]}) for messages, body in calls]
    assert not warnings_for(named, caplog)


def test_few_conversations_are_judged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []

    def judge(_: object, call_id: str) -> bool:
        judged.append(call_id)
        return False

    monkeypatch.setattr("branchline.gateway.episode_check.begins_unrelated", judge)
    assert not warnings_for([call(user(f"task {number}")) for number in range(20)], caplog)
    assert len(judged) == 8
