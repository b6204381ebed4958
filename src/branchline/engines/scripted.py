"""An engine that says what it is told: replies by rule, deterministic, with every behaviour of a real one.

Tests, demos and the gateway's own examples run on it. A rule sees the prompt (as ids and as text) and
answers with a reply; the engine spells it with the codec's toy tokens and streams it chunk by chunk.

    engine = ScriptedEngine(ToyCodec.chatml(), lambda ask: f"you said {ask.last_line!r}")
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from branchline.chat.toy import ToyCodec
from branchline.core.errors import EngineError, EngineInputError
from branchline.core.message import Message
from branchline.core.token_arrays import Floats, Ids, as_ids
from branchline.engines.base import Chunk, LogprobKind, SamplingParams


@dataclass(frozen=True)
class ScriptedRequest:
    """What a rule is asked: a prompt, and how often the engine was asked before."""

    prompt_ids: Ids
    prompt_text: str
    call_index: int
    params: SamplingParams

    @property
    def last_line(self) -> str:
        """The last thing that was said before the reply."""
        lines = [line for line in self.prompt_text.replace("<end>", "\n").splitlines() if line.strip()]
        return lines[-2].partition(":")[2] if len(lines) > 1 else ""


ScriptedReply = Message | str | Exception
ReplyRule = Callable[[ScriptedRequest], ScriptedReply]


def replies(*said: ScriptedReply) -> ReplyRule:
    """A rule that gives these replies in turn, and the last one from then on."""
    return lambda ask: said[min(ask.call_index, len(said) - 1)]


@dataclass
class ScriptedEngine:
    """Replies by rule."""

    codec: ToyCodec = field(default_factory=ToyCodec.chatml)
    rule: ReplyRule = field(default_factory=lambda: replies("ok"))
    name: str = "scripted"
    version: int = 0
    logprob_kind: LogprobKind = "processed"
    max_context: int | None = None
    chunk_size: int = 4
    """Ids a chunk; small, so that streams are streams."""
    gate: asyncio.Event | None = None
    """Where given, no chunk leaves before it is set: tests hold generations with it."""
    received_prompts: list[Ids] = field(default_factory=list)
    """Every prompt, in order of arrival."""
    aborted_count: int = 0
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._resumed.set()

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        if params.grammar is not None:
            raise EngineInputError("response_format: the scripted engine cannot keep to a grammar")
        number = len(self.received_prompts)
        self.received_prompts.append(prompt_ids)
        reply = self.rule(ScriptedRequest(prompt_ids, self.codec.decode(prompt_ids), number, params))
        if isinstance(reply, Exception):
            raise reply if isinstance(reply, EngineError) else EngineError(str(reply)) from reply
        ids = self.codec.encode_reply(Message("assistant", reply) if isinstance(reply, str) else reply)
        cut = len(ids) > params.max_tokens
        ids = ids[: params.max_tokens]
        finished = False
        try:
            for start in range(0, max(1, len(ids)), self.chunk_size):
                await self._resumed.wait()
                if self.gate is not None:
                    await self.gate.wait()
                part = ids[start : start + self.chunk_size]
                last = start + self.chunk_size >= len(ids)
                finish: str | None = ("length" if cut else "stop") if last else None
                finished = last
                yield Chunk(part, scripted_logprobs(prompt_ids, ids, start, len(part)), self.version, finish)  # type: ignore[arg-type]
                await asyncio.sleep(0)
        finally:
            self.aborted_count += not finished

    async def ready(self) -> None:
        pass

    def release_session(self, session: str) -> None:
        pass

    async def pause(self) -> None:
        self._resumed.clear()

    async def resume(self, version: int | None = None) -> None:
        self.version = self.version if version is None else version
        self._resumed.set()

    async def close(self) -> None:
        self._resumed.set()


def scripted_logprobs(prompt_ids: Ids, ids: Sequence[int] | Ids, start: int, count: int) -> Floats:
    """Logprobs that depend on everything before them, so that a misplaced one is seen."""
    base = zlib.crc32(np.ascontiguousarray(prompt_ids).tobytes())
    places = np.arange(start, start + count)
    said = np.asarray(as_ids(ids), np.int64)[start : start + count]
    mixed = (base + 2654435761 * (places + 1) + 97 * said) % 10_000
    return (-mixed / 10_000).astype(np.float32)
