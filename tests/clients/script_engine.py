"""An engine that plays a script, holds helpers until they overlap, and remembers what crossed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

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
    """Replies by script.

    Where a script says that its helpers meet, the first reply of each waits for the other's request: they
    were asked side by side or the run fails. Where it says so, a helper waits for its parent's turn, and its
    parent's turn for the helpers' ends: who comes first must not be chance.
    """

    def __init__(self, stage: PromptReader, script: Script) -> None:
        # One token at a time: a client that wants one call an answer gets no token more, nor is one made.
        super().__init__(stage, lambda ask: script.reply(stage.read(ask.prompt_ids)), chunk_size=1)  # type: ignore[arg-type]
        self._prompt_reader = stage
        self._script = script
        self._arrived: set[str] = set()
        self._ended: set[str] = set()
        self._finished_turns: set[int] = set()
        self._changed = asyncio.Condition()
        self.generations: list[RecordedGeneration] = []

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncIterator[Chunk]:
        prompt = self._prompt_reader.read(prompt_ids)
        who, turn = self._script.agent_of(prompt), prompt.turn
        crossed = RecordedGeneration(prompt_ids.tolist(), who, turn)
        self.generations.append(crossed)
        await self._wait(who, turn)
        try:
            async for chunk in super().generate(prompt_ids, params, session=session):
                crossed.ids += chunk.ids.tolist()
                yield chunk
        finally:
            # Also where the gateway wants no more of it.
            async with self._changed:
                if who == "main":
                    self._finished_turns.add(turn)
                elif who in HELPERS and turn == len(self._script.helper(who)) - 1:
                    self._ended.add(who)
                self._changed.notify_all()

    async def _wait(self, who: str, turn: int) -> None:
        if who in HELPERS and turn == 0:
            async with self._changed:
                self._arrived.add(who)
                self._changed.notify_all()
            if self._script.helpers_overlap:
                await self._until(lambda: self._arrived >= set(HELPERS))
            released_by = self._script.released_by_turn.get(who, 0)
            await self._until(lambda: released_by in self._finished_turns)
        elif who == "main" and turn == self._script.turn_after_helpers:
            await self._until(lambda: self._ended >= set(HELPERS))

    async def _until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(OVERLAP_TIMEOUT_S), self._changed:
            await self._changed.wait_for(happened)
