"""Scripted trajectories of the agent `state`: the model's answers, and where they are cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from branchline.chat.base import Codec
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.toy import ToyCodec
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Ids
from branchline.gateway.server import Gateway
from branchline.loop.agents import AgentContext, run_agent
from branchline.loop.context.context_loop import CONTEXT_TOOLS, ContextOptions
from branchline.loop.http_model import HttpModel
from branchline.loop.model import Model, SessionModel
from branchline.loop.output import LoopOutput, build_output
from branchline.loop.registry import ToolRegistry
from branchline.loop.state import LoopState
from branchline.loop.task import LoopLimits, Task
from branchline.loop.timeouts import CancelToken
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.runtime.managed_session import ManagedSession, SessionLimits, SessionOptions
from branchline.runtime.session_store import SessionStore
from branchline.testing.reply_encoder import TemplateReplyEncoder
from branchline.tree.tree import Tree
from tests.chat.families import load_codec
from tests.loop.harness import ReplyRecorder, ResumableScriptedEngine

DOCUMENT = "\n".join(f"Line {number}: the value of item {number} is {number * 7}." for number in range(60))
SYSTEM, QUESTION = "You read.", "What is the value of item 41?"
SETUPS = ["toy", "toy over http", "qwen3", "qwen3 over http"]


def codec_for(setup: str) -> Codec:
    return ToyCodec.chatml() if setup.startswith("toy") else load_codec("qwen3")


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments))


def answer(*calls: ToolCall, text: str = "", reasoning: str = "") -> Message:
    return Message("assistant", text, reasoning_content=reasoning, tool_calls=calls)


def encode_messages(codec: Codec, messages: Sequence[Message]) -> list[Ids]:
    if isinstance(codec, ToyCodec):
        return [codec.encode_reply(message) for message in messages]
    assert isinstance(codec, GenericCodec)
    return [
        TemplateReplyEncoder(codec, Random(index)).encode_reply(message)
        for index, message in enumerate(messages)
    ]


class EchoTool(BaseTool):
    """Returns its argument: a tool of another kind than those of the agent."""

    name = "echo"
    is_repeatable = True
    schema = function_schema(
        "echo",
        "Returns a text.",
        {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    )

    async def execute(self, instance: Any, arguments: Any) -> ToolResult:
        if arguments["text"] == "fail":
            raise ValueError("no text")
        return ToolResult(arguments["text"])


@dataclass
class ContextHarness:
    """A session, a scripted engine and a task of the agent `state`."""

    codec: Codec
    managed: ManagedSession
    engine: ResumableScriptedEngine
    model: ReplyRecorder
    limits: LoopLimits | None
    options: ContextOptions | None
    tools: tuple[str, ...] | None
    cancel_count: int = 0
    on_cancel: Callable[[], None] = lambda: None

    @property
    def tree(self) -> Tree:
        return self.managed.session.tree

    def task(self) -> Task:
        return Task(
            (Message("system", SYSTEM), Message("user", QUESTION)),
            agent_name="state",
            tools=self.tools,
            documents={"book": DOCUMENT},
            limits=self.limits,
        )

    def context(self, cancel: CancelToken | None = None) -> AgentContext:
        return AgentContext(
            self.model, ToolRegistry([EchoTool()]), cancel=cancel, context_options=self.options
        )

    async def run(self) -> LoopState:
        """Runs to the end, cancelled at the engine's points; each cancelled state is encoded and decoded."""
        state = LoopState.begin(self.task(), "t")
        while True:
            cancel = CancelToken()
            running = asyncio.create_task(run_agent(state, self.context(cancel)))
            stopping = asyncio.create_task(self._cancel_at_point(cancel))
            state = await running
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            if not state.is_cancelled:
                return state
            self.cancel_count += 1
            self.on_cancel()
            self.engine.at_cancel_point.clear()
            state = LoopState.decode(state.encode())

    async def _cancel_at_point(self, cancel: CancelToken) -> None:
        await self.engine.at_cancel_point.wait()
        cancel.cancel()

    async def output(self, state: LoopState, **policy: Any) -> LoopOutput:
        return await build_output(state, self.model, policy=policy)


@asynccontextmanager
async def context_harness(
    answers: Sequence[Message],
    setup: str = "toy",
    *,
    codec: Codec | None = None,
    limits: LoopLimits | None = None,
    options: ContextOptions | None = None,
    tools: tuple[str, ...] | None = (*CONTEXT_TOOLS, "echo"),
    cancel_points: Sequence[Sequence[int]] = (),
    calls_limit: int | None = None,
    **session_options: Any,
) -> AsyncIterator[ContextHarness]:
    codec = codec or codec_for(setup)
    engine = ResumableScriptedEngine(encode_messages(codec, answers), cancel_points)
    async with AsyncExitStack() as stack:
        model: Model
        if setup.endswith("http"):
            gateway = await stack.enter_async_context(Gateway(engine=engine, codec=codec))
            session = await gateway.session(**session_options)
            managed = session.managed
            model = await stack.enter_async_context(
                HttpModel(session.base_url, session.api_key, session.control_key, codec=codec)
            )
        else:
            options_of_session = SessionOptions(limits=SessionLimits(calls=calls_limit), **session_options)
            managed, _, _ = SessionStore(codec).open(options_of_session)
            model = SessionModel(managed, engine)
        yield ContextHarness(codec, managed, engine, ReplyRecorder(model, managed.id), limits, options, tools)
