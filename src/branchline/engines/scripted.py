"""A deterministic engine for tests, demos and examples: a rule returns the reply to each prompt.

The rule receives the prompt as ids and as text. The engine encodes its reply with the codec's toy tokens and
streams it in chunks, with the pause, resume and abort behaviour of a real engine.

    engine = ScriptedEngine(ToyCodec.chatml(), lambda request: f"you said {request.last_line!r}")
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from branchline.chat.base import Codec
from branchline.chat.toy import ToyCodec
from branchline.chat.vision import ImageSpan
from branchline.core.errors import EngineError, EngineInputError
from branchline.core.message import Message
from branchline.core.token_arrays import Floats, Ids, as_ids
from branchline.engines.base import Chunk, FinishReason, LogprobKind, SamplingParams


@dataclass(frozen=True)
class ScriptedRequest:
    """The argument of a rule."""

    prompt_ids: Ids
    prompt_text: str
    call_index: int
    """The number of earlier calls."""
    params: SamplingParams

    @property
    def last_line(self) -> str:
        """The content of the prompt's last message."""
        lines = [line for line in self.prompt_text.replace("<end>", "\n").splitlines() if line.strip()]
        return lines[-2].partition(":")[2] if len(lines) > 1 else ""


ScriptedReply = Message | str | Exception
ReplyRule = Callable[[ScriptedRequest], ScriptedReply]


def replies(*scripted: ScriptedReply) -> ReplyRule:
    """Returns a rule that gives these replies in turn, and then repeats the last one."""
    return lambda request: scripted[min(request.call_index, len(scripted) - 1)]


@dataclass
class ScriptedEngine:
    """Samples the replies of a rule."""

    codec: Codec = field(default_factory=ToyCodec.chatml)
    rule: ReplyRule = field(default_factory=lambda: replies("ok"))
    name: str = "scripted"
    version: int = 0
    logprob_kind: LogprobKind = "processed"
    logprobs_after_truncation: bool | None = True
    greedy_logprob_temperature: float | None = 1.0
    max_context: int | None = None
    supports_images: bool = True
    supported_fields: frozenset[str] = frozenset()
    """The fields that it accepts; a rule finds their values in the parameters."""
    constrains_raw_logprobs: bool = False
    chunk_size: int = 4
    """Ids per chunk; small, so that replies are streamed."""
    gate: asyncio.Event | None = None
    """If given, no chunk is yielded before it is set; tests hold generations with it."""
    received_images: list[Sequence[ImageSpan]] = field(default_factory=list)
    """The images of each prompt."""
    received_prompts: list[Ids] = field(default_factory=list)
    """All prompts, in order of arrival."""
    aborted_count: int = 0
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._resumed.set()

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        if params.grammar is not None and not self.supported_fields:
            raise EngineInputError("response_format: the scripted engine supports no grammar")
        call_index = len(self.received_prompts)
        self.received_prompts.append(prompt_ids)
        self.received_images.append(images)
        reply = self.rule(ScriptedRequest(prompt_ids, self.codec.decode(prompt_ids), call_index, params))
        if isinstance(reply, Exception):
            raise reply if isinstance(reply, EngineError) else EngineError(str(reply)) from reply
        ids = self.codec.encode_reply(Message("assistant", reply) if isinstance(reply, str) else reply)
        finish_reason: FinishReason = "length" if len(ids) > params.max_tokens else "stop"
        ids = ids[: params.max_tokens]
        is_finished = False
        try:
            for start in range(0, max(1, len(ids)), self.chunk_size):
                await self._resumed.wait()
                if self.gate is not None:
                    await self.gate.wait()
                part = ids[start : start + self.chunk_size]
                is_finished = start + self.chunk_size >= len(ids)
                logprobs = scripted_logprobs(prompt_ids, ids, start, len(part))
                yield Chunk(part, logprobs, self.version, finish_reason if is_finished else None)
                await asyncio.sleep(0)
        finally:
            self.aborted_count += not is_finished

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
    """Returns logprobs that depend on prompt, position and id, so that tests notice a misplaced one."""
    base = zlib.crc32(np.ascontiguousarray(prompt_ids).tobytes())
    positions = np.arange(start, start + count)
    part = np.asarray(as_ids(ids), np.int64)[start : start + count]
    mixed = (base + 2654435761 * (positions + 1) + 97 * part) % 10_000
    return (-mixed / 10_000).astype(np.float32)
