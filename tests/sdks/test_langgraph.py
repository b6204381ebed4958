"""LangGraph with `langchain-openai`: a graph of model and tools, its memory, and what is done to that."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, RemoveMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import SecretStr

from branchline.core.errors import ContextLengthError
from tests.sdks.harness import (
    QUESTIONS,
    REPLIES,
    SYSTEM,
    Scenario,
    SdkSession,
    look,
    run_scenario,
    scenarios,
    sdk_session,
    streamed,
    templates,
)

THREAD: Any = {"configurable": {"thread_id": "1"}}
LOOK = tool(look)


def graph(s: SdkSession, *, stream: bool, responses: bool = False) -> Any:
    model = ChatOpenAI(
        model="m", base_url=s.url, api_key=SecretStr(s.key), streaming=stream, use_responses_api=responses
    ).bind_tools([LOOK])

    def ask(state: MessagesState) -> Any:
        return {"messages": [model.invoke([("system", SYSTEM), *state["messages"]])]}

    builder = StateGraph(MessagesState)
    builder.add_node("model", ask)
    builder.add_node("tools", ToolNode([LOOK]))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", tools_condition)
    builder.add_edge("tools", "model")
    return builder.compile(checkpointer=InMemorySaver())


def converse(app: Any, *, stream: bool) -> list[str]:
    answers = []
    for question in QUESTIONS:
        given = {"messages": [("user", question)]}
        if stream:
            for _ in app.stream(given, THREAD, stream_mode="messages"):
                pass
        else:
            app.invoke(given, THREAD)
        answers.append(app.get_state(THREAD).values["messages"][-1].text)
    return answers


@scenarios
@streamed
@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_graph_with_memory_is_one_timeline(scenario: Scenario, stream: bool, responses: bool) -> None:
    s = run_scenario(
        scenario, lambda s: converse(graph(s, stream=stream, responses=responses), stream=stream)
    )
    rewritten = set() if responses else {"arguments_reserialised", "empty_content"}
    assert s.equivalences <= {"dropped_reasoning", *rewritten}


@templates
def test_deleted_steps_are_deleted_context(template: str) -> None:
    with sdk_session(template) as s:
        app = graph(s, stream=False)
        reply = app.invoke({"messages": [("user", QUESTIONS[0])]}, THREAD)["messages"]
        app.update_state(THREAD, {"messages": [RemoveMessage(step.id) for step in reply[1:-1]]})
        app.invoke({"messages": [("user", QUESTIONS[1])]}, THREAD)
    s.check(calls=4)
    assert s.causes == {"repair_loop": 1}
    assert s.timeline_calls == [[0, 1, 2], [3]]


@templates
def test_summary_of_the_history_is_a_compaction(template: str) -> None:
    summary = "The places 1, 2 and 3 were looked at, and there is a door in one of them."
    with sdk_session(template, [*REPLIES[:3], summary, REPLIES[3]]) as s:
        app = graph(s, stream=False)
        for question in (QUESTIONS[0], "Sum it up."):
            reply = app.invoke({"messages": [("user", question)]}, THREAD)["messages"]
        kept = HumanMessage(f"So far: {reply[-1].text}")
        app.update_state(THREAD, {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), kept]})
        app.invoke({"messages": [("user", QUESTIONS[1])]}, THREAD)
    s.check(calls=5)
    assert s.causes == {"compaction": 1}
    assert s.timeline_calls == [[0, 1, 2, 3], [4]]


@templates
def test_named_node_is_a_separate_agent(template: str) -> None:
    with sdk_session(template, ["A door.", "Is it?", "It is."]) as s:
        actor, critic = (
            ChatOpenAI(
                model="m",
                base_url=s.url,
                api_key=SecretStr(s.key),
                default_headers={"x-branchline-agent": name},
            )
            for name in ("actor", "critic")
        )
        reply = actor.invoke([("user", QUESTIONS[0])])
        doubt = critic.invoke([("user", f"Judge: {reply.text}")])
        actor.invoke([("user", QUESTIONS[0]), reply, ("user", doubt.text)])
    s.check(calls=3)
    assert s.causes == {"sub_agent": 1}
    assert sorted((line.agent, calls) for line, calls in zip(s.timelines, s.timeline_calls, strict=True)) == [
        ("actor", [0, 2]),
        ("critic", [1]),
    ]


@pytest.mark.parametrize("responses", [False, True])
@streamed
def test_too_long_prompt_is_recognised(responses: bool, stream: bool) -> None:
    with sdk_session("toy", [ContextLengthError.for_prompt(900, 200)]) as s:
        model = ChatOpenAI(
            model="m",
            base_url=s.url,
            api_key=SecretStr(s.key),
            streaming=stream,
            use_responses_api=responses,
            max_retries=0,
        )
        # It does not read an event of that type.
        expected = ValueError if responses and stream else ContextOverflowError
        with pytest.raises(expected, match="prompt is too long"):
            model.invoke("q")
