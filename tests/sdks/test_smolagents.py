"""smolagents. It keeps steps, not messages: every reply goes back as a text of its own making."""

from __future__ import annotations

import json
from typing import Any

import pytest
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

from branchline import Message, ToolCall
from tests.sdks.harness import QUESTIONS, call, look, sdk_session, streamed, templates

LOOK = tool(look)


def final(text: str) -> ToolCall:
    return ToolCall("final_answer", json.dumps({"answer": text}))


def code(line: str) -> Message:
    # The closing tag is a stop string of the agent: nothing after it is sampled.
    return Message("assistant", f"Thought: so.\n<code>\n{line}\n</code>Observation: made up")


CALLS = (
    Message("assistant", reasoning_content="Two places.", tool_calls=(call(1), call(2, far=True))),
    Message("assistant", "Once more.", tool_calls=(call(3),)),
    Message("assistant", tool_calls=(final("A door."),)),
    Message("assistant", tool_calls=(final("Still a door."),)),
)
CODE = (
    code("print(look(at=1, far=False))"),
    code("print(look(at=2, far=True))"),
    code("final_answer('A door.')"),
    code("final_answer('Still a door.')"),
)


@templates
@streamed
@pytest.mark.parametrize(("kind", "reply"), [(ToolCallingAgent, CALLS), (CodeAgent, CODE)])
def test_every_rewritten_reply_is_a_fork_and_nothing_is_lost(
    template: str, stream: bool, kind: Any, reply: Any
) -> None:
    # One token at a time, so that a stop text ends the engine's work where it ends the reply.
    with sdk_session(template, reply, chunk_size=1) as s:
        model = OpenAIModel("m", api_base=s.url, api_key=s.key)
        agent = kind(tools=[LOOK], model=model, stream_outputs=stream, verbosity_level=-1)
        answers = [agent.run(QUESTIONS[0]), agent.run(QUESTIONS[1], reset=False)]
        model.client.close()
    assert answers == ["A door.", "Still a door."]
    s.check(calls=4)
    assert s.causes == {"edit": 3}
    assert s.timeline_calls == [[0], [1], [2], [3]]
