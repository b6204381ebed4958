"""A stage for SDKs: a gateway, a model that says its lines, and what the tree must show.

The lines are one story: the model looks in two places at once, looks once more, answers; it is asked again
and answers again. Every SDK plays it with its own agent loop. What the engine got and gave is written down
beside the tree, so that the tree is checked against something it did not make.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from threading import Thread
from typing import Any

import pytest

from branchline import Message, ToolCall, ToyCodec
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

# -- the story ---------------------------------------------------------------------------------------

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
    """A call of the tool, spaced as no serialiser would: whoever writes it anew is seen."""
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
_THOUGHTS = ("Two places.", "Not sure.", "It is a door.", "It has not moved.")


@dataclass(frozen=True)
class Scenario:
    """Who plays the model: by whose tokenizer and template, and whether it thinks before it speaks."""

    template: str
    """`toy`: a byte is a token, and nothing is forgotten. Else a real family."""
    has_reasoning: bool

    @property
    def replies(self) -> tuple[Message, ...]:
        if not self.has_reasoning:
            return REPLIES
        return tuple(
            Message("assistant", said.content, reasoning_content=thought, tool_calls=said.tool_calls)
            for said, thought in zip(REPLIES, _THOUGHTS, strict=True)
        )

    @property
    def strips_reasoning(self) -> bool:
        """Whether the template itself leaves earlier thoughts out once the user speaks again."""
        return self.has_reasoning and self.template == "qwen3"


SCENARIOS = (Scenario("toy", True), Scenario("qwen3", False), Scenario("qwen3", True))
scenarios = pytest.mark.parametrize(
    "scene",
    SCENARIOS,
    ids=[scene.template + ("-thinks" if scene.has_reasoning else "") for scene in SCENARIOS],
)
templates = pytest.mark.parametrize("voice", ["toy", "qwen3"])
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


# -- the stage ---------------------------------------------------------------------------------------


class RecordingEngine(ScriptedEngine):
    """A scripted engine that writes down what it was asked and what it gave."""

    generations: list[tuple[list[int], list[int]]]

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncIterator[Chunk]:
        given: list[int] | None = None
        async for chunk in super().generate(prompt_ids, params, session=session):
            if given is None:
                given = []
                self.generations.append((prompt_ids.tolist(), given))
            given += chunk.ids.tolist()
            yield chunk


class PerSessionEngine(ScriptedEngine):
    """An engine of its own for every session: a gateway takes longer to stop than a story to play."""

    engines: defaultdict[str, RecordingEngine]

    def generate(self, prompt_ids: Ids, params: SamplingParams, *, session: str = "") -> AsyncIterator[Chunk]:
        return self.engines[session].generate(prompt_ids, params, session=session)


class ThreadedGateway:
    """A gateway in a thread, for SDKs that block and for those that bring their own event loop.

    A session that was not opened on a stage is played the story.
    """

    def __init__(self, voice: str, *, auth: bool = True) -> None:
        self._codec: Any = ToyCodec.chatml() if voice == "toy" else load_codec(voice)
        self._engines = PerSessionEngine()
        self._engines.engines = defaultdict(lambda: self._engine(REPLIES))
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=f"gateway of {voice}")
        self._thread.start()
        self.gateway = Gateway(engine=self._engines, codec=self._codec, config=GatewayConfig(auth=auth))
        self._run(self.gateway.start())

    def open(self, said: Sequence[ScriptedReply], chunk_size: int) -> SdkSession:
        session: GatewaySession = self._run(self.gateway.session())
        engine = self._engines.engines[session.id] = self._engine(said, chunk_size)
        return SdkSession(session, engine)

    def _engine(self, said: Sequence[ScriptedReply], chunk_size: int = 4) -> RecordingEngine:
        codec = self._codec
        # Words cut anywhere and sometimes compact JSON: a reply that is encoded again is another one.
        speaker = codec if isinstance(codec, ToyCodec) else TemplateReplyEncoder(codec, Random(7))

        class ReplyCodec:
            encode_reply = staticmethod(speaker.encode_reply)
            decode = staticmethod(codec.decode)

        engine = RecordingEngine(ReplyCodec(), replies(*said), chunk_size=chunk_size)  # type: ignore[arg-type]
        engine.generations = []
        return engine

    def wait_idle(self) -> None:
        """Waits until every call is over: a client has its answer a moment before that is written down."""

        async def settled() -> None:
            while self.gateway.app.model_api.in_flight:
                await asyncio.sleep(0)

        self._run(settled())

    def close(self) -> None:
        self._run(self.gateway.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


GATEWAYS: dict[str, ThreadedGateway] = {}
"""Those that are open, by voice."""


@dataclass(frozen=True)
class SdkSession:
    """What a test gives its SDK, and, once the SDK is done, what came of it."""

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
    def echoes(self) -> set[str]:
        """What was tolerated to know the model's own words again."""
        return {str(echo.equivalence) for call in self.tree.calls for echo in call.applied_equivalences}

    def check(self, calls: int) -> None:
        """What holds whatever the client did: C1 for every call, and an account of every sampled token."""
        paths = []
        for call in self.tree.calls:
            for output in call.outputs:
                node = self.tree.nodes[output]
                path, sampled = self.tree.path_ids(node).tolist(), node.sampled_ids
                assert sampled is not None
                place = len(path) - len(sampled)
                assert call.prompt_tokens == place
                paths.append((path[:place], path[place:]))
        assert sorted(paths) == sorted(self.engine.generations)
        assert len(self.tree.calls) == calls
        given = sum(len(given) for _, given in self.engine.generations)
        export = export_samples(self.tree)
        # All were delivered, so all are trained; each with shares that make one.
        assert (export.report.sampled_tokens, export.report.trained_tokens) == (given, given)
        assert sum(float(sample.shares.sum()) for sample in export.samples) == pytest.approx(given)
        assert all(sample.exact and not sample.missing_logprobs for sample in export.samples)


@contextmanager
def sdk_session(
    voice: str, said: Sequence[ScriptedReply] = REPLIES, *, chunk_size: int = 4
) -> Iterator[SdkSession]:
    """A session whose model says these lines; behind the block its tree is all there."""
    house = GATEWAYS.get(voice) or GATEWAYS.setdefault(voice, ThreadedGateway(voice))
    yield house.open(said, chunk_size)
    house.wait_idle()


def run_scenario(scene: Scenario, agent: Callable[[SdkSession], Sequence[str]]) -> SdkSession:
    """Has an SDK play the story; it must get the answers, and have done nothing but append.

    One timeline then, unless the model's own template forgets thoughts, which is no doing of the client's.
    """
    with sdk_session(scene.template, scene.replies) as s:
        assert list(agent(s)) == ANSWERS
    s.check(calls=len(REPLIES))
    assert s.causes == ({"think_strip": 1} if scene.strips_reasoning else {})
    assert s.timeline_calls == ([[0, 1, 2], [3]] if scene.strips_reasoning else [[0, 1, 2, 3]])
    # An SDK may have words of its own to put before the system prompt.
    system, *said = [(message.role, message.content) for message in s.timelines[-1].messages]
    assert (system[0], system[1][-len(SYSTEM) :], *said) == ("system", SYSTEM, *HISTORY)
    return s
