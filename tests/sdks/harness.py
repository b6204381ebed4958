"""A harness for SDKs: a gateway, a scripted model, and checks of the resulting tree.

All SDKs run one scenario with their own agent loops: the model makes two parallel tool calls, one more call,
and answers; after a second question it answers again. The engine records its prompts and outputs, so that the
tree is checked against an independent record.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from threading import Thread
from typing import Any

import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.chat.vision import ImageSpan
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import ScriptedEngine, ScriptedReply, replies
from branchline.export.samples import export_samples
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway, GatewaySession
from branchline.testing.reply_encoder import TemplateReplyEncoder
from branchline.timelines.causes import classify_forks
from branchline.timelines.timeline import Timeline, timelines_of
from branchline.tree.tree import Tree
from tests.chat.families import load_codec
from tests.hang import HANG_S

# -- the scenario ------------------------------------------------------------------------------------

SYSTEM = "You look around."
QUESTIONS = ("What is there?", "And now?")
TOOL = "look"
ABOUT_TOOL = "Looks at a place."
SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "integer"}, "far": {"type": "boolean"}},
    "required": ["at", "far"],
}


def look(at: int, far: bool) -> str:
    """Looks at a place.

    Args:
        at: which one
        far: whether it is far away
    """
    return f"place {at}, far {far}: grüße 🙂"


def call(at: int, far: bool = False) -> ToolCall:
    """A tool call with unusual spacing, so that a client that serialises it again is detected."""
    return ToolCall(TOOL, f'{{"far":{str(far).lower()},  "at":{at}}}')


REPLIES = (
    Message("assistant", tool_calls=(call(1), call(2, far=True))),
    Message("assistant", "Once more.", tool_calls=(call(3),)),
    Message("assistant", "A door, grüße 🙂"),
    Message("assistant", "Still a door."),
)
ANSWERS = ["A door, grüße 🙂", "Still a door."]
HISTORY = [
    ("user", QUESTIONS[0]),
    ("assistant", ""),
    ("tool", look(1, False)),
    ("tool", look(2, True)),
    ("assistant", "Once more."),
    ("tool", look(3, False)),
    ("assistant", ANSWERS[0]),
    ("user", QUESTIONS[1]),
    ("assistant", ANSWERS[1]),
]
_REASONING = ("Two places.", "Not sure.", "It is a door.", "It has not moved.")


@dataclass(frozen=True)
class Scenario:
    """The template and tokenizer of the model, and whether its replies have reasoning."""

    template: str
    """`toy`: a byte is a token, and no reasoning is dropped. Else a real model family."""
    has_reasoning: bool

    @property
    def replies(self) -> tuple[Message, ...]:
        if not self.has_reasoning:
            return REPLIES
        return tuple(
            Message("assistant", reply.content, reasoning_content=reasoning, tool_calls=reply.tool_calls)
            for reply, reasoning in zip(REPLIES, _REASONING, strict=True)
        )

    @property
    def strips_reasoning(self) -> bool:
        """Whether the template drops earlier reasoning after the next user message."""
        return self.has_reasoning and self.template == "qwen3"


SCENARIOS = (Scenario("toy", True), Scenario("qwen3", False), Scenario("qwen3", True))
scenarios = pytest.mark.parametrize(
    "scenario",
    SCENARIOS,
    ids=[scenario.template + ("-reasoning" if scenario.has_reasoning else "") for scenario in SCENARIOS],
)
templates = pytest.mark.parametrize("template", ["toy", "qwen3"])
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


# -- the gateway -------------------------------------------------------------------------------------


class RecordingEngine(ScriptedEngine):
    """A scripted engine that records its prompts and outputs."""

    generations: list[tuple[list[int], list[int]]]

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        output: list[int] | None = None
        async for chunk in super().generate(prompt_ids, params, session=session, images=images):
            if output is None:
                output = []
                self.generations.append((prompt_ids.tolist(), output))
            output += chunk.ids.tolist()
            yield chunk


class PerSessionEngine(ScriptedEngine):
    """A separate engine for every session, so that all tests share one gateway."""

    engines: defaultdict[str, RecordingEngine]

    def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        return self.engines[session].generate(prompt_ids, params, session=session, images=images)


class ThreadedGateway:
    """A gateway in a thread, for SDKs that block and for those that bring their own event loop.

    A session that was not opened by `sdk_session` gets the replies of the scenario.
    """

    def __init__(self, template: str, *, auth: bool = True) -> None:
        self._codec: Any = ToyCodec.chatml() if template == "toy" else load_codec(template)
        self._engines = PerSessionEngine()
        self._engines.engines = defaultdict(lambda: self._engine(REPLIES))
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=f"gateway {template}")
        self._thread.start()
        self.gateway = Gateway(engine=self._engines, codec=self._codec, config=GatewayConfig(auth=auth))
        self._run(self.gateway.start())

    def open(self, scripted: Sequence[ScriptedReply], chunk_size: int) -> SdkSession:
        session: GatewaySession = self._run(self.gateway.session())
        engine = self._engines.engines[session.id] = self._engine(scripted, chunk_size)
        return SdkSession(session, engine)

    def _engine(self, scripted: Sequence[ScriptedReply], chunk_size: int = 4) -> RecordingEngine:
        codec = self._codec
        # Unusual token boundaries and JSON spacing: a reply that is encoded again has other ids.
        encoder = codec if isinstance(codec, ToyCodec) else TemplateReplyEncoder(codec, Random(7))

        class ReplyCodec:
            encode_reply = staticmethod(encoder.encode_reply)
            decode = staticmethod(codec.decode)

        engine = RecordingEngine(ReplyCodec(), replies(*scripted), chunk_size=chunk_size)  # type: ignore[arg-type]
        engine.generations = []
        return engine

    def wait_idle(self) -> None:
        """Waits until every call is over: a client has its answer before the delivery is recorded."""

        async def wait() -> None:
            while self.gateway.app.model_api.in_flight:
                await asyncio.sleep(0)

        self._run(wait())

    def close(self) -> None:
        self._run(self.gateway.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_S)
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


GATEWAYS: dict[str, ThreadedGateway] = {}
"""Running gateways by template."""


@dataclass(frozen=True)
class SdkSession:
    """A session for an SDK, and the results after the SDK has finished."""

    session: GatewaySession
    engine: RecordingEngine

    @property
    def url(self) -> str:
        return self.session.base_url

    @property
    def anthropic_url(self) -> str:
        return self.session.anthropic_base_url

    @property
    def key(self) -> str:
        return self.session.api_key

    @property
    def tree(self) -> Tree:
        return self.session.managed.session.tree

    @property
    def timelines(self) -> list[Timeline]:
        return timelines_of(self.tree)

    @property
    def timeline_calls(self) -> list[list[int]]:
        """The calls of each timeline, by number; timelines in the order they ended."""
        return [[call.index for call in line.calls] for line in self.timelines]

    @property
    def causes(self) -> dict[str, int]:
        """The forks by cause."""
        return dict(Counter(str(fork.cause) for fork in classify_forks(self.tree).forks))

    @property
    def equivalences(self) -> set[str]:
        """The differences tolerated to recognise the model's replies."""
        return {str(echo.equivalence) for call in self.tree.calls for echo in call.applied_equivalences}

    def check(self, calls: int) -> None:
        """Checks what must hold for every client: C1 for every call, and every sampled token is trained."""
        paths = []
        for call in self.tree.calls:
            for output in call.outputs:
                node = self.tree.nodes[output]
                path, sampled = self.tree.path_ids(node).tolist(), node.sampled_ids
                assert sampled is not None
                start = len(path) - len(sampled)
                assert call.prompt_tokens == start
                paths.append((path[:start], path[start:]))
        assert sorted(paths) == sorted(self.engine.generations)
        assert len(self.tree.calls) == calls
        sampled_tokens = sum(len(output) for _, output in self.engine.generations)
        export = export_samples(self.tree)
        # All were delivered, so all are trained, with shares that sum to one.
        assert export.report.sampled_tokens == export.report.trained_tokens == sampled_tokens
        assert sum(float(sample.shares.sum()) for sample in export.samples) == pytest.approx(sampled_tokens)
        assert all(sample.exact and not sample.missing_logprobs for sample in export.samples)


@contextmanager
def sdk_session(
    template: str, scripted: Sequence[ScriptedReply] = REPLIES, *, chunk_size: int = 4
) -> Iterator[SdkSession]:
    """A session whose model gives these replies; after the block its tree is complete."""
    gateway = GATEWAYS.get(template) or GATEWAYS.setdefault(template, ThreadedGateway(template))
    yield gateway.open(scripted, chunk_size)
    gateway.wait_idle()


def run_scenario(scenario: Scenario, agent: Callable[[SdkSession], Sequence[str]]) -> SdkSession:
    """Runs an SDK through the scenario; checks its answers, and that it only appended messages.

    The result is one timeline, unless the model's own template drops earlier reasoning.
    """
    with sdk_session(scenario.template, scenario.replies) as s:
        assert list(agent(s)) == ANSWERS
    s.check(calls=len(REPLIES))
    assert s.causes == ({"think_strip": 1} if scenario.strips_reasoning else {})
    assert s.timeline_calls == ([[0, 1, 2], [3]] if scenario.strips_reasoning else [[0, 1, 2, 3]])
    # An SDK may put a text of its own before the system prompt.
    system, *history = [(message.role, message.content) for message in s.timelines[-1].messages]
    assert (system[0], system[1][-len(SYSTEM) :], *history) == ("system", SYSTEM, *HISTORY)
    return s
