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
from branchline.core.runs import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import Reply, ScriptedEngine, replies
from branchline.export.samples import export_samples
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway, GatewaySession
from branchline.testing.speaker import TemplateSpeaker
from branchline.timelines.causes import judge
from branchline.timelines.timeline import Timeline, timelines_of
from branchline.tree.tree import Tree
from tests.chat.families import codec_of

# -- the story ---------------------------------------------------------------------------------------

SYSTEM = "You look around."
ASKED = ("What is there?", "And now?")
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


STORY = (
    Message("assistant", calls=(call(1), call(2, far=True))),
    Message("assistant", "Once more.", calls=(call(3),)),
    Message("assistant", "A door, grüße 🙂"),
    Message("assistant", "Still a door."),
)
ANSWERS = ["A door, grüße 🙂", "Still a door."]
HISTORY = [
    ("user", ASKED[0]),
    ("assistant", ""),
    ("tool", look(1, False)),
    ("tool", look(2, True)),
    ("assistant", "Once more."),
    ("tool", look(3, False)),
    ("assistant", ANSWERS[0]),
    ("user", ASKED[1]),
    ("assistant", ANSWERS[1]),
]
_THOUGHTS = ("Two places.", "Not sure.", "It is a door.", "It has not moved.")


@dataclass(frozen=True)
class Scene:
    """Who plays the model: by whose tokenizer and template, and whether it thinks before it speaks."""

    voice: str
    """`toy`: a byte is a token, and nothing is forgotten. Else a real family."""
    thinks: bool

    @property
    def said(self) -> tuple[Message, ...]:
        if not self.thinks:
            return STORY
        return tuple(
            Message("assistant", said.text, reasoning=thought, calls=said.calls)
            for said, thought in zip(STORY, _THOUGHTS, strict=True)
        )

    @property
    def is_forgetful(self) -> bool:
        """Whether the template itself leaves earlier thoughts out once the user speaks again."""
        return self.thinks and self.voice == "qwen3"


SCENES = (Scene("toy", True), Scene("qwen3", False), Scene("qwen3", True))
scenes = pytest.mark.parametrize(
    "scene", SCENES, ids=[scene.voice + ("-thinks" if scene.thinks else "") for scene in SCENES]
)
voices = pytest.mark.parametrize("voice", ["toy", "qwen3"])
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


# -- the stage ---------------------------------------------------------------------------------------


class HeardEngine(ScriptedEngine):
    """A scripted engine that writes down what it was asked and what it gave."""

    heard: list[tuple[list[int], list[int]]]

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncIterator[Chunk]:
        given: list[int] | None = None
        async for chunk in super().generate(prompt_ids, params, session=session):
            if given is None:
                given = []
                self.heard.append((prompt_ids.tolist(), given))
            given += chunk.ids.tolist()
            yield chunk


class Cast(ScriptedEngine):
    """An engine of its own for every session: a gateway takes longer to stop than a story to play."""

    parts: defaultdict[str, HeardEngine]

    def generate(self, prompt_ids: Ids, params: SamplingParams, *, session: str = "") -> AsyncIterator[Chunk]:
        return self.parts[session].generate(prompt_ids, params, session=session)


class House:
    """A gateway in a thread, for SDKs that block and for those that bring their own event loop.

    A session that was not opened on a stage is played the story.
    """

    def __init__(self, voice: str, *, auth: bool = True) -> None:
        self._codec: Any = ToyCodec.chatml() if voice == "toy" else codec_of(voice)
        self._cast = Cast()
        self._cast.parts = defaultdict(lambda: self._engine(STORY))
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=f"gateway of {voice}")
        self._thread.start()
        self.gateway = Gateway(engine=self._cast, codec=self._codec, config=GatewayConfig(auth=auth))
        self._do(self.gateway.start())

    def open(self, said: Sequence[Reply], chunk_size: int) -> Stage:
        session: GatewaySession = self._do(self.gateway.session())
        engine = self._cast.parts[session.id] = self._engine(said, chunk_size)
        return Stage(session, engine)

    def _engine(self, said: Sequence[Reply], chunk_size: int = 4) -> HeardEngine:
        codec = self._codec
        # Words cut anywhere and sometimes compact JSON: a reply that is encoded again is another one.
        speaker = codec if isinstance(codec, ToyCodec) else TemplateSpeaker(codec, Random(7))

        class Voice:
            spell = staticmethod(speaker.spell)
            decode = staticmethod(codec.decode)

        engine = HeardEngine(Voice(), replies(*said), chunk_size=chunk_size)  # type: ignore[arg-type]
        engine.heard = []
        return engine

    def settle(self) -> None:
        """Waits until every call is over: a client has its answer a moment before that is written down."""

        async def settled() -> None:
            while self.gateway.app.model.in_flight:
                await asyncio.sleep(0)

        self._do(settled())

    def close(self) -> None:
        self._do(self.gateway.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


HOUSES: dict[str, House] = {}
"""Those that are open, by voice."""


@dataclass(frozen=True)
class Stage:
    """What a test gives its SDK, and, once the SDK is done, what came of it."""

    session: GatewaySession
    engine: HeardEngine

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
        return self.session.live.session.tree

    @property
    def timelines(self) -> list[Timeline]:
        return timelines_of(self.tree)

    @property
    def ran(self) -> list[list[int]]:
        """The calls of each timeline, by number; timelines in the order they ended."""
        return [[call.index for call in line.calls] for line in self.timelines]

    @property
    def causes(self) -> dict[str, int]:
        """The forks by cause."""
        return dict(Counter(str(fork.cause) for fork in judge(self.tree).forks))

    @property
    def echoes(self) -> set[str]:
        """What was tolerated to know the model's own words again."""
        return {str(echo.equivalence) for call in self.tree.calls for echo in call.echoes}

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
        assert sorted(paths) == sorted(self.engine.heard)
        assert len(self.tree.calls) == calls
        given = sum(len(given) for _, given in self.engine.heard)
        export = export_samples(self.tree)
        # All were delivered, so all are trained; each with shares that make one.
        assert (export.report.sampled_tokens, export.report.trained_tokens) == (given, given)
        assert sum(float(sample.shares.sum()) for sample in export.samples) == pytest.approx(given)
        assert all(sample.exact and not sample.missing_logprobs for sample in export.samples)


@contextmanager
def stage(voice: str, said: Sequence[Reply] = STORY, *, chunk_size: int = 4) -> Iterator[Stage]:
    """A session whose model says these lines; behind the block its tree is all there."""
    house = HOUSES.get(voice) or HOUSES.setdefault(voice, House(voice))
    yield house.open(said, chunk_size)
    house.settle()


def play(scene: Scene, agent: Callable[[Stage], Sequence[str]]) -> Stage:
    """Has an SDK play the story; it must get the answers, and have done nothing but append.

    One timeline then, unless the model's own template forgets thoughts, which is no doing of the client's.
    """
    with stage(scene.voice, scene.said) as s:
        assert list(agent(s)) == ANSWERS
    s.check(calls=len(STORY))
    assert s.causes == ({"think_strip": 1} if scene.is_forgetful else {})
    assert s.ran == ([[0, 1, 2], [3]] if scene.is_forgetful else [[0, 1, 2, 3]])
    # An SDK may have words of its own to put before the system prompt.
    system, *said = [(message.role, message.text) for message in s.timelines[-1].messages]
    assert (system[0], system[1][-len(SYSTEM) :], *said) == ("system", SYSTEM, *HISTORY)
    return s
