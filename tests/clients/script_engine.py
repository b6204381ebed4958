"""An engine that follows a script, holds sub-agents until they overlap, and records its generations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from branchline.chat.vision import ImageSpan
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import ScriptedEngine
from tests.clients.prompt_readers import PromptReader
from tests.clients.scripts import HELPERS, Script

OVERLAP_TIMEOUT_S = 30


@dataclass
class RecordedGeneration:
    """One generation as the engine saw it."""

    prompt: list[int]
    agent: str
    turn: int
    ids: list[int] = field(default_factory=list)


class ScriptEngine(ScriptedEngine):
    """Replies by script, in an order that does not depend on timing.

    With `helpers_overlap`, the first reply of each helper waits for the other's request: the client runs them
    concurrently or the test fails. With `released_by_turn`, a helper waits for a turn of the main agent; with
    `turn_after_helpers`, that turn of the main agent waits for the helpers.
    """

    def __init__(self, reader: PromptReader, script: Script) -> None:
        # One token per chunk: if a client wants one call per answer, no further token is generated.
        super().__init__(reader, lambda request: script.reply(reader.read(request.prompt_ids)), chunk_size=1)  # type: ignore[arg-type]
        self.supported_fields = frozenset({"response_format"})  # Claude Code asks for its titles as JSON
        self._prompt_reader = reader
        self._script = script
        self._arrived: set[str] = set()
        self._ended: set[str] = set()
        self._finished_turns: set[int] = set()
        self._changed = asyncio.Condition()
        self.generations: list[RecordedGeneration] = []

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        prompt = self._prompt_reader.read(prompt_ids)
        agent, turn = self._script.agent_of(prompt), prompt.turn
        generation = RecordedGeneration(prompt_ids.tolist(), agent, turn)
        self.generations.append(generation)
        await self._wait(agent, turn)
        try:
            async for chunk in super().generate(prompt_ids, params, session=session, images=images):
                generation.ids += chunk.ids.tolist()
                yield chunk
        finally:
            # Also if the gateway stops the generation.
            async with self._changed:
                if agent == "main":
                    self._finished_turns.add(turn)
                elif agent in HELPERS and turn == len(self._script.helper(agent)) - 1:
                    self._ended.add(agent)
                self._changed.notify_all()

    async def _wait(self, agent: str, turn: int) -> None:
        if agent in HELPERS and turn == 0:
            async with self._changed:
                self._arrived.add(agent)
                self._changed.notify_all()
            if self._script.helpers_overlap:
                await self._until(lambda: self._arrived >= set(HELPERS))
            released_by = self._script.released_by_turn.get(agent, 0)
            await self._until(lambda: released_by in self._finished_turns)
        elif agent == "main" and turn == self._script.turn_after_helpers:
            await self._until(lambda: self._ended >= set(HELPERS))

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(OVERLAP_TIMEOUT_S), self._changed:
            await self._changed.wait_for(condition)
