"""Scripts for loops: what a model says, what tools do, where everything is cancelled; and a stage for them.

The engine is deterministic in what stands before: asked behind half of an answer, it says the other half,
with the same logprobs. So a run that was cancelled and resumed can be held against one that was not.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from branchline.chat.base import Codec
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.toy import ToyCodec
from branchline.core.message import Message, ToolCall
from branchline.core.runs import Ids, as_ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.gateway.live import LiveSession, SessionOptions
from branchline.gateway.server import Gateway
from branchline.gateway.sessions import Sessions
from branchline.loop.cancel import CancelToken
from branchline.loop.interactions.base import BaseInteraction, Response
from branchline.loop.interactions.registry import Partner
from branchline.loop.machine import AgentLoop
from branchline.loop.model import Model, Reply, SessionModel
from branchline.loop.remote import HttpModel
from branchline.loop.state import LoopLimits, LoopState, Task
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.loop.tools.registry import ToolRegistry
from branchline.testing.speaker import TemplateSpeaker
from branchline.tree.tree import Tree


@dataclass(frozen=True)
class Deed:
    """A tool call, and what comes of it."""

    tool: str = "deed"
    text: str = "done"
    fails: bool = False
    bad: bool = False
    """Arguments that do not fit the schema."""
    holds: int = 0
    """How often it is cancelled while it works."""


@dataclass(frozen=True)
class Turn:
    """A turn of the model."""

    text: str = ""
    reasoning: str = ""
    deeds: tuple[Deed, ...] = ()
    holds: tuple[int, ...] = ()
    """Behind so many new ids each attempt at it is cancelled."""

    def message(self, place: int) -> Message:
        calls = tuple(
            ToolCall(deed.tool, json.dumps({"turn": "x" if deed.bad else place, "place": index}))
            for index, deed in enumerate(self.deeds)
        )
        return Message("assistant", self.text, reasoning=self.reasoning, calls=calls)


@dataclass(frozen=True)
class Script:
    """A whole trajectory."""

    turns: tuple[Turn, ...]
    user: tuple[str, ...] = ()
    """What an interaction says to turns without calls, in order; then it ends the conversation."""

    @property
    def uninterrupted(self) -> Script:
        turns = [
            replace(turn, holds=(), deeds=tuple(replace(deed, holds=0) for deed in turn.deeds))
            for turn in self.turns
        ]
        return Script(tuple(turns), self.user)


def spelled(codec: Codec, script: Script) -> list[Ids]:
    """The answers as ids, for a real tokenizer in odd pieces."""
    if isinstance(codec, ToyCodec):
        return [codec.spell(turn.message(place)) for place, turn in enumerate(script.turns)]
    assert isinstance(codec, GenericCodec)
    return [
        TemplateSpeaker(codec, Random(place)).spell(turn.message(place))
        for place, turn in enumerate(script.turns)
    ]


@dataclass
class Talker:
    """An engine that says a script, once in each session."""

    answers: Sequence[Ids]
    holds: Sequence[Sequence[int]] = ()
    name: str = "talker"
    version: int = 0
    logprob_kind: Any = "processed"
    max_context: int | None = None
    memory: dict[str, list[Ids]] = field(default_factory=dict)
    """The prompts of each session, in order; replicas share one."""
    asked: list[tuple[str, Ids]] = field(default_factory=list)
    """Every prompt, with its session."""
    held: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    gate: asyncio.Event | None = None
    """Where given, every answer waits for it behind its first id."""

    def __post_init__(self) -> None:
        self._holds = [list(holds) for holds in self.holds]
        self._waiting: set[object] = set()
        self._came = asyncio.Condition()

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        self.asked.append((session, prompt_ids))
        if self.failure is not None:
            raise self.failure
        number, said = self._place(prompt_ids, session)
        ids = self.answers[number][said : said + params.max_tokens]
        is_cut = said + len(ids) < len(self.answers[number])
        holds = self._holds[number] if number < len(self._holds) else []
        hold = holds.pop(0) if holds else None
        for place, token in enumerate(ids.tolist()):
            if place == hold:
                self.held.set()
                await asyncio.Event().wait()
            if place == 1 and self.gate is not None:
                await self._wait(self.gate)
            prompt_ids = np.append(prompt_ids, np.int32(token))
            logprob = -(zlib.crc32(prompt_ids.astype(np.int32).tobytes()) % 10_000) / 10_000
            last = place == len(ids) - 1
            finish: Any = ("length" if is_cut else "stop") if last else None
            yield Chunk(as_ids([token]), np.array([logprob], np.float32), self.version, finish)
            await asyncio.sleep(0)

    async def _wait(self, gate: asyncio.Event) -> None:
        me = object()
        self._waiting.add(me)
        async with self._came:
            self._came.notify_all()
        try:
            await gate.wait()
        finally:
            self._waiting.discard(me)

    async def everybody_waits(self, count: int) -> None:
        """Returns when so many answers wait at the gate."""
        async with self._came:
            await self._came.wait_for(lambda: len(self._waiting) >= count)

    def _place(self, prompt_ids: Ids, session: str) -> tuple[int, int]:
        """Which answer this is, and how much of it stands in the prompt already."""
        begun = self.memory.setdefault(session, [])
        for number, prompt in enumerate(begun):
            said = len(prompt_ids) - len(prompt)
            answer = self.answers[number]
            if 0 <= said < len(answer) and np.array_equal(
                prompt_ids, np.concatenate((prompt, answer[:said]))
            ):
                return number, said
        begun.append(prompt_ids)
        return len(begun) - 1, 0

    async def pause(self) -> None: ...
    async def resume(self, version: int | None = None) -> None: ...
    async def close(self) -> None: ...


class Deeds(BaseTool):
    """Does what a script says, and counts."""

    name = "deed"
    schema = function_schema(
        "deed",
        "Does it.",
        {
            "type": "object",
            "properties": {"turn": {"type": "integer"}, "place": {"type": "integer"}},
            "required": ["turn", "place"],
        },
    )

    def __init__(self, script: Script) -> None:
        self._turns = script.turns
        self._holds = {
            (place, index): deed.holds
            for place, turn in enumerate(script.turns)
            for index, deed in enumerate(turn.deeds)
        }
        self.held = asyncio.Event()
        self.created = self.released = self.most_at_once = 0
        self._running = 0
        self.done: list[tuple[int, int]] = []

    async def create(self, trajectory: str, **arguments: Any) -> str:
        self.created += 1
        return trajectory

    async def execute(self, instance: str, arguments: Mapping[str, Any]) -> ToolResult:
        turn, place = arguments["turn"], arguments["place"]
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            return await self._do(turn, place)
        finally:
            self._running -= 1

    async def _do(self, turn: int, place: int) -> ToolResult:
        deed = self._turns[turn].deeds[place]
        await asyncio.sleep(0)
        if self._holds[turn, place]:
            self._holds[turn, place] -= 1
            self.held.set()
            await asyncio.Event().wait()
        self.done.append((turn, place))
        if deed.fails:
            raise ValueError(deed.text)
        return ToolResult(deed.text, reward=float(len(deed.text)), extras={"turn": turn})

    async def calc_reward(self, instance: str) -> float | None:
        return 0.5

    async def release(self, instance: str) -> None:
        self.released += 1


class User(BaseInteraction):
    """Says its lines, one to each turn without calls, and remembers how many it has said."""

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

    async def respond(self, state: list[str], messages: Sequence[Message]) -> Response:
        place = len(state)
        state.append(messages[-1].text)
        if place >= len(self._lines):
            return Response(True, score=1.0)
        return Response(False, self._lines[place], score=0.1 * place, extras={"place": place})

    async def score(self, state: list[str]) -> float | None:
        return float(len(state))

    async def finalize(self, state: Any) -> None:
        self.finalized += 1


class Watched:
    """A model whose answers are kept."""

    def __init__(self, model: Model, session_id: str) -> None:
        self._model = model
        self.session_id = session_id
        self.replies: list[Reply] = []

    @property
    def codec(self) -> Codec | None:
        return self._model.codec

    async def ask(self, messages: Sequence[Message], **options: Any) -> Reply:
        reply = await self._model.ask(messages, **options)
        self.replies.append(reply)
        return reply

    async def count(self, messages: Sequence[Message], **options: Any) -> int:
        return await self._model.count(messages, **options)

    async def samples(self) -> Any:
        return await self._model.samples()


@dataclass
class Stage:
    """A session with a script on it, in process or behind HTTP."""

    script: Script
    codec: Codec
    live: LiveSession
    engine: Talker
    model: Watched
    tool: Deeds
    user: User
    limits: LoopLimits | None = None
    cancels: int = 0
    on_cancel: Callable[[], None] = lambda: None
    another: Callable[[], Awaitable[Watched]] = field(kw_only=True)
    """Opens another session on the same engine."""

    @property
    def tree(self) -> Tree:
        return self.live.session.tree

    def task(self) -> Task:
        messages = (Message("system", "You work."), Message("user", "Begin."))
        return Task(messages, agent_name="tool", limits=self.limits)

    async def play(self, state: LoopState | None = None) -> LoopState:
        """Runs to the end, cancelled where the script says so; each time the state goes on elsewhere."""
        state = state or LoopState.begin(self.task(), "t")
        while True:
            cancel = CancelToken()
            run = asyncio.create_task(self.run_once(state, cancel))
            stop = asyncio.create_task(self._stop(cancel))
            state = await run
            stop.cancel()
            await asyncio.gather(stop, return_exceptions=True)
            if not state.is_cancel:
                return state
            self.cancels += 1
            self.on_cancel()
            state = LoopState.decode(state.encode("json" if self.cancels % 2 else "msgpack"))

    async def run_once(
        self,
        state: LoopState | None = None,
        cancel: CancelToken | None = None,
        model: Watched | None = None,
        limits: LoopLimits | None = None,
    ) -> LoopState:
        """Runs to the end or to a cancel."""
        state = state or LoopState.begin(self.task(), "t")
        tools = ToolRegistry([self.tool]).select()
        partner = Partner(self.user) if self.script.user else None
        async with AgentLoop(model or self.model, state, tools=tools, partner=partner, limits=limits) as loop:
            return await loop.run(cancel)

    async def _stop(self, cancel: CancelToken) -> None:
        """Cancels when the model or a tool is held."""
        waits = [
            asyncio.create_task(self.engine.held.wait()),
            asyncio.create_task(self.tool.held.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            self.engine.held.clear()
            self.tool.held.clear()
            cancel.cancel()
        finally:
            for wait in waits:
                wait.cancel()


@asynccontextmanager
async def stage(
    script: Script,
    codec: Codec | None = None,
    *,
    over_http: bool = False,
    limits: LoopLimits | None = None,
    engine: Any = None,
    **options: Any,
) -> AsyncIterator[Stage]:
    """A stage; `engine` stands before the talker."""
    codec = codec or ToyCodec.chatml()
    talker = Talker(spelled(codec, script), [turn.holds for turn in script.turns])
    async with AsyncExitStack() as stack:
        sessions = Sessions(codec)
        if over_http:
            gateway = await stack.enter_async_context(Gateway(engine=engine or talker, codec=codec))

        async def opened() -> tuple[LiveSession, Watched]:
            model: Model
            if over_http:
                session = await gateway.session(**options)
                live = session.live
                model = await stack.enter_async_context(
                    HttpModel(session.base_url, session.api_key, session.control_key, codec=codec)
                )
            else:
                live, _, _ = sessions.open(SessionOptions(**options))
                model = SessionModel(live, engine or talker)
            return live, Watched(model, live.id)

        async def another() -> Watched:
            return (await opened())[1]

        live, model = await opened()
        user, tool = User(script.user), Deeds(script)
        yield Stage(script, codec, live, talker, model, tool, user, limits, another=another)


def tree_of(live: LiveSession) -> list[Any]:
    """A tree as values, without the names that are drawn anew each time."""
    tree = live.session.tree
    nodes = [
        (
            node.id,
            node.parent and node.parent.id,
            _nameless(node.message),
            node.ids.tolist(),
            node.spans,
            None
            if node.output is None
            else (
                node.output.call,
                node.output.finish,
                None if node.output.logprobs is None else node.output.logprobs.tolist(),
                node.output.versions,
            ),
            node.agent,
            node.source,
        )
        for node in tree.nodes
    ]
    calls = [
        (
            (call.index, call.agent, call.prompt_node, call.outputs, call.prompt_tokens, call.frame),
            (call.echoes, call.ambiguous_echo, call.encoded_tokens, call.rewritten, call.retry),
            (dict(call.sampling), call.shown, call.trained, call.resumes, tree.delivery(call)),
        )
        for call in tree.calls
    ]
    return [nodes, calls]


def _nameless(message: Message) -> Any:
    calls = [(call.name, call.arguments) for call in message.calls]
    return (message.role, message.text, message.reasoning, calls, message.name, message.parts, message.form)
