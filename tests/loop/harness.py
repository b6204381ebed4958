"""Scripted loops for tests: the model's answers, what tools do, and where everything is cancelled.

The engine is deterministic in its prompt: prompted with half of an answer it returns the other half with the
same logprobs. So a cancelled and resumed run can be compared with an uninterrupted one. `run` runs an async
test on a clock that the test moves, and fails if a task is left over.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from branchline.chat.base import Codec
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.toy import ToyCodec
from branchline.chat.vision import ImageSpan
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.gateway.server import Gateway
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.http_model import HttpModel
from branchline.loop.interaction import BaseInteraction, InteractionConfig, InteractionResponse
from branchline.loop.model import Model, SessionModel
from branchline.loop.registry import ToolRegistry
from branchline.loop.state import LoopState
from branchline.loop.task import LoopLimits, Task
from branchline.loop.timeouts import CancelToken
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.runtime.call_record import CallResult
from branchline.runtime.managed_session import ManagedSession, SessionOptions
from branchline.runtime.session_store import SessionStore
from branchline.testing.reply_encoder import TemplateReplyEncoder
from branchline.tree.tree import Tree
from tests.engines.manual_clock import ManualClockLoop
from tests.hang import fail_if_hung


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs an async test; no task and no reported exception may be left over."""
    problems: list[Any] = []

    async def main() -> None:
        ManualClockLoop.running().set_exception_handler(lambda _, context: problems.append(context))
        await fail_if_hung(test())
        assert len(asyncio.all_tasks()) == 1, asyncio.all_tasks()

    with asyncio.Runner(loop_factory=ManualClockLoop) as runner:
        runner.run(main())
    assert not problems


def move_clock(seconds: float) -> None:
    """Advances the clock; timers that are due fire at the test's next await."""
    ManualClockLoop.running().offset_s += seconds


async def pass_control(rounds: int = 5) -> None:
    """Lets other tasks run for some rounds of the event loop."""
    for _ in range(rounds):
        await asyncio.sleep(0)


@dataclass(frozen=True)
class ScriptedToolCall:
    """A tool call and its result."""

    tool: str = "act"
    result: str = "done"
    fails: bool = False
    invalid_arguments: bool = False
    """Whether the arguments do not fit the schema."""
    cancels: int = 0
    """How often it is cancelled while it runs."""


@dataclass(frozen=True)
class ScriptedTurn:
    """One answer of the model."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ScriptedToolCall, ...] = ()
    cancel_points: tuple[int, ...] = ()
    """After how many new ids each attempt is cancelled."""

    def message(self, turn: int) -> Message:
        calls = tuple(
            ToolCall(call.tool, json.dumps({"turn": "x" if call.invalid_arguments else turn, "index": index}))
            for index, call in enumerate(self.tool_calls)
        )
        return Message("assistant", self.text, reasoning_content=self.reasoning, tool_calls=calls)


@dataclass(frozen=True)
class LoopScript:
    """A trajectory."""

    turns: tuple[ScriptedTurn, ...]
    user_messages: tuple[str, ...] = ()
    """The interaction's responses to turns without calls, in order; then it ends the conversation."""

    @property
    def uninterrupted(self) -> LoopScript:
        """The script without cancellations."""
        turns = [
            replace(
                turn, cancel_points=(), tool_calls=tuple(replace(call, cancels=0) for call in turn.tool_calls)
            )
            for turn in self.turns
        ]
        return LoopScript(tuple(turns), self.user_messages)


def encode_answers(codec: Codec, script: LoopScript) -> list[Ids]:
    """The answers as ids; for a real tokenizer not in its canonical encoding."""
    if isinstance(codec, ToyCodec):
        return [codec.encode_reply(turn.message(index)) for index, turn in enumerate(script.turns)]
    assert isinstance(codec, GenericCodec)
    return [
        TemplateReplyEncoder(codec, Random(index)).encode_reply(turn.message(index))
        for index, turn in enumerate(script.turns)
    ]


@dataclass
class ResumableScriptedEngine:
    """An engine that returns a script's answers, once in each session."""

    answers: Sequence[Ids]
    cancel_points: Sequence[Sequence[int]] = ()
    name: str = "scripted"
    version: int = 0
    logprob_kind: Any = "processed"
    logprobs_after_truncation: bool | None = True
    greedy_logprob_temperature: float | None = 1.0
    supports_images: bool = True
    supported_fields: frozenset[str] = frozenset()
    constrains_raw_logprobs: bool = False
    max_context: int | None = None
    prompts_by_session: dict[str, list[Ids]] = field(default_factory=dict)
    """The prompts of each session, in order; replicas share one."""
    requests: list[tuple[str, Ids]] = field(default_factory=list)
    """Every prompt, with its session."""
    at_cancel_point: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    gate: asyncio.Event | None = None
    """If set, every answer waits for it after its first id."""

    def __post_init__(self) -> None:
        self._cancel_points = [list(points) for points in self.cancel_points]
        self._waiting: set[object] = set()
        self._arrived = asyncio.Condition()

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        self.requests.append((session, prompt_ids))
        if self.failure is not None:
            raise self.failure
        number, done = self._find_answer(prompt_ids, session)
        ids = self.answers[number][done : done + params.max_tokens]
        is_cut = done + len(ids) < len(self.answers[number])
        points = self._cancel_points[number] if number < len(self._cancel_points) else []
        cancel_point = points.pop(0) if points else None
        for index, token in enumerate(ids.tolist()):
            if index == cancel_point:
                self.at_cancel_point.set()
                await asyncio.Event().wait()
            if index == 1 and self.gate is not None:
                await self._wait(self.gate)
            prompt_ids = np.append(prompt_ids, np.int32(token))
            logprob = -(zlib.crc32(prompt_ids.astype(np.int32).tobytes()) % 10_000) / 10_000
            last = index == len(ids) - 1
            finish: Any = ("length" if is_cut else "stop") if last else None
            yield Chunk(as_ids([token]), np.array([logprob], np.float32), self.version, finish)
            await asyncio.sleep(0)

    async def _wait(self, gate: asyncio.Event) -> None:
        waiter = object()
        self._waiting.add(waiter)
        async with self._arrived:
            self._arrived.notify_all()
        try:
            await gate.wait()
        finally:
            self._waiting.discard(waiter)

    async def wait_until_waiting(self, count: int) -> None:
        """Returns when `count` answers wait at the gate."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self._waiting) >= count)

    def _find_answer(self, prompt_ids: Ids, session: str) -> tuple[int, int]:
        """The index of the answer, and how many of its ids the prompt ends with."""
        prompts = self.prompts_by_session.setdefault(session, [])
        for number, prompt in enumerate(prompts):
            done, answer = len(prompt_ids) - len(prompt), self.answers[number]
            if 0 <= done < len(answer) and np.array_equal(
                prompt_ids, np.concatenate((prompt, answer[:done]))
            ):
                return number, done
        prompts.append(prompt_ids)
        return len(prompts) - 1, 0

    async def ready(self) -> None: ...
    def release_session(self, session: str) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self, version: int | None = None) -> None: ...
    async def close(self) -> None: ...


class ScriptedTool(BaseTool):
    """Runs the calls of a script and counts them."""

    name = "act"
    schema = function_schema(
        "act",
        "Acts.",
        {
            "type": "object",
            "properties": {"turn": {"type": "integer"}, "index": {"type": "integer"}},
            "required": ["turn", "index"],
        },
    )

    def __init__(self, script: LoopScript) -> None:
        self._turns = script.turns
        self._cancels = {
            (number, index): call.cancels
            for number, turn in enumerate(script.turns)
            for index, call in enumerate(turn.tool_calls)
        }
        self.at_cancel_point = asyncio.Event()
        self.created = self.released = self.max_concurrency = 0
        self._running = 0
        self.executed: list[tuple[int, int]] = []

    async def create(self, trajectory: str, **arguments: Any) -> str:
        self.created += 1
        return trajectory

    async def execute(self, instance: str, arguments: Mapping[str, Any]) -> ToolResult:
        turn, index = arguments["turn"], arguments["index"]
        self._running += 1
        self.max_concurrency = max(self.max_concurrency, self._running)
        try:
            return await self._execute_scripted(turn, index)
        finally:
            self._running -= 1

    async def _execute_scripted(self, turn: int, index: int) -> ToolResult:
        call = self._turns[turn].tool_calls[index]
        await asyncio.sleep(0)
        if self._cancels[turn, index]:
            self._cancels[turn, index] -= 1
            self.at_cancel_point.set()
            await asyncio.Event().wait()
        self.executed.append((turn, index))
        if call.fails:
            raise ValueError(call.result)
        return ToolResult(call.result, reward=float(len(call.result)), extras={"turn": turn})

    async def calc_reward(self, instance: str) -> float | None:
        return 0.5

    async def release(self, instance: str) -> None:
        self.released += 1


class ScriptedUser(BaseInteraction):
    """Responds with its lines, one for each turn without calls; its state survives a cancellation."""

    name = "user"

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self.started = self.finalized = 0

    async def start(self, trajectory: str, **arguments: Any) -> tuple[list[str], str | None]:
        self.started += 1
        return [], None

    def save(self, state: list[str]) -> list[str]:
        return list(state)

    async def restore(self, trajectory: str, saved: list[str], **arguments: Any) -> list[str]:
        self.started += 1
        return saved

    async def respond(self, state: list[str], messages: Sequence[Message]) -> InteractionResponse:
        index = len(state)
        state.append(messages[-1].content)
        if index >= len(self._lines):
            return InteractionResponse(True, score=1.0)
        return InteractionResponse(False, self._lines[index], score=0.1 * index, extras={"index": index})

    async def score(self, state: list[str]) -> float | None:
        return float(len(state))

    async def finalize(self, state: Any) -> None:
        self.finalized += 1


class ReplyRecorder:
    """A model that keeps its answers."""

    def __init__(self, model: Model, session_id: str) -> None:
        self._model = model
        self.session_id = session_id
        self.replies: list[CallResult] = []

    @property
    def codec(self) -> Codec | None:
        return self._model.codec

    async def ask(self, messages: Sequence[Message], **options: Any) -> CallResult:
        reply = await self._model.ask(messages, **options)
        self.replies.append(reply)
        return reply

    async def count_tokens(self, messages: Sequence[Message], **options: Any) -> int:
        return await self._model.count_tokens(messages, **options)

    @property
    def session(self) -> Any:
        return self._model.session

    async def samples(self, **options: Any) -> Any:
        return await self._model.samples(**options)

    async def export(self, **options: Any) -> Any:
        return await self._model.export(**options)


@dataclass
class LoopHarness:
    """A session with a scripted engine, in process or over HTTP."""

    script: LoopScript
    codec: Codec
    managed: ManagedSession
    engine: ResumableScriptedEngine
    model: ReplyRecorder
    tool: ScriptedTool
    user: ScriptedUser
    limits: LoopLimits | None = None
    cancel_count: int = 0
    on_cancel: Callable[[], None] = lambda: None
    open_another: Callable[[], Awaitable[ReplyRecorder]] = field(kw_only=True)
    """Opens another session on the same engine."""

    @property
    def tree(self) -> Tree:
        return self.managed.session.tree

    def task(self) -> Task:
        messages = (Message("system", "You work."), Message("user", "Begin."))
        return Task(messages, agent_name="tool", limits=self.limits)

    async def run_until_finished(self, state: LoopState | None = None) -> LoopState:
        """Runs to the end, cancelled at the script's points; after each the state is encoded and decoded."""
        state = state or LoopState.begin(self.task(), "t")
        while True:
            cancel = CancelToken()
            run = asyncio.create_task(self.run_once(state, cancel))
            stop = asyncio.create_task(self._cancel_at_point(cancel))
            state = await run
            stop.cancel()
            await asyncio.gather(stop, return_exceptions=True)
            if not state.is_cancelled:
                return state
            self.cancel_count += 1
            self.on_cancel()
            state = LoopState.decode(state.encode("json" if self.cancel_count % 2 else "msgpack"))

    async def run_once(
        self,
        state: LoopState | None = None,
        cancel: CancelToken | None = None,
        model: ReplyRecorder | None = None,
        limits: LoopLimits | None = None,
    ) -> LoopState:
        """Runs to the end or until it is cancelled."""
        state = state or LoopState.begin(self.task(), "t")
        tools = ToolRegistry([self.tool]).select()
        user = InteractionConfig(self.user) if self.script.user_messages else None
        async with AgentLoop(
            model or self.model, state, tools=tools, interaction=user, limits=limits
        ) as loop:
            return await loop.run(cancel)

    async def _cancel_at_point(self, cancel: CancelToken) -> None:
        """Cancels when the model or a tool has reached a cancel point."""
        waits = [
            asyncio.create_task(self.engine.at_cancel_point.wait()),
            asyncio.create_task(self.tool.at_cancel_point.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            self.engine.at_cancel_point.clear()
            self.tool.at_cancel_point.clear()
            cancel.cancel()
        finally:
            for wait in waits:
                wait.cancel()


@asynccontextmanager
async def loop_harness(
    script: LoopScript,
    codec: Codec | None = None,
    *,
    over_http: bool = False,
    limits: LoopLimits | None = None,
    engine: Any = None,
    **options: Any,
) -> AsyncIterator[LoopHarness]:
    """A harness; `engine` wraps or replaces the scripted engine."""
    codec = codec or ToyCodec.chatml()
    scripted = ResumableScriptedEngine(
        encode_answers(codec, script), [turn.cancel_points for turn in script.turns]
    )
    async with AsyncExitStack() as stack:
        sessions = SessionStore(codec)
        if over_http:
            gateway = await stack.enter_async_context(Gateway(engine=engine or scripted, codec=codec))

        async def open_session() -> tuple[ManagedSession, ReplyRecorder]:
            model: Model
            if over_http:
                session = await gateway.session(**options)
                managed = session.managed
                model = await stack.enter_async_context(
                    HttpModel(session.base_url, session.api_key, session.control_key, codec=codec)
                )
            else:
                managed, _, _ = sessions.open(SessionOptions(**options))
                model = SessionModel(managed, engine or scripted)
            return managed, ReplyRecorder(model, managed.id)

        async def open_another() -> ReplyRecorder:
            return (await open_session())[1]

        managed, model = await open_session()
        user, tool = ScriptedUser(script.user_messages), ScriptedTool(script)
        yield LoopHarness(
            script, codec, managed, scripted, model, tool, user, limits, open_another=open_another
        )


def tree_values(managed: ManagedSession) -> list[Any]:
    """A tree as comparable values, without random ids."""
    tree = managed.session.tree
    nodes = [
        (
            node.id,
            node.parent and node.parent.id,
            _message_values(node.message),
            node.ids.tolist(),
            node.spans,
            None
            if node.output is None
            else (
                node.output.call_index,
                node.output.finish_reason,
                None if node.output.logprobs is None else node.output.logprobs.tolist(),
                node.output.versions,
            ),
            node.agent,
            node.source_id,
        )
        for node in tree.nodes
    ]
    calls = [
        (
            (
                call.index,
                call.agent,
                call.prompt_node,
                call.outputs,
                call.prompt_tokens,
                call.prompt_config_digest,
            ),
            (
                call.applied_equivalences,
                call.ambiguous_match,
                call.encoded_tokens,
                call.rewrite_reason,
                call.retry_count,
            ),
            (
                dict(call.sampling),
                call.reused_nodes,
                call.trainable,
                call.resumed_call_index,
                tree.delivery(call),
            ),
        )
        for call in tree.calls
    ]
    return [nodes, calls]


def _message_values(message: Message) -> Any:
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return (
        message.role,
        message.content,
        message.reasoning_content,
        calls,
        message.name,
        message.parts,
        message.wire_shape,
    )
