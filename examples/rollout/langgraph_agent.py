"""The same agent with LangGraph: a graph of model and tool."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import SecretStr

from examples.rollout.records import MAX_TURNS, SYSTEM, look_up


async def run(task: Mapping[str, Any], session: Any) -> None:
    @tool
    def lookup(key: str) -> str:
        """Looks a record up."""
        return look_up(task, key)

    model = ChatOpenAI(
        model="policy",
        base_url=session.base_url,
        api_key=SecretStr(session.api_key),
        max_completion_tokens=48,
    ).bind_tools([lookup])

    async def ask(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke([("system", SYSTEM), *state["messages"]])]}

    builder = StateGraph(MessagesState)
    builder.add_node("model", ask)
    builder.add_node("tools", ToolNode([lookup]))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", tools_condition)
    builder.add_edge("tools", "model")
    messages: Any = {"messages": [("user", task["prompt"])]}
    with suppress(GraphRecursionError):  # what the model did is scored as it is
        await builder.compile().ainvoke(messages, {"recursion_limit": 2 * MAX_TURNS})
