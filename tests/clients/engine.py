"""An engine that plays a script, holds helpers until they overlap, and remembers what crossed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from branchline.core.runs import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import ScriptedEngine
from tests.clients.prompts import Stage
from tests.clients.scripts import HELPERS, Script

MEETING_S = 30


@dataclass
class Crossed:
    """One generation as the engine saw it."""

    prompt: list[int]
    who: str
    turn: int
    ids: list[int] = field(default_factory=list)


class Theatre(ScriptedEngine):
    """Replies by script.

    Where a script says that its helpers meet, the first reply of each waits for the other's request: they
    were asked side by side or the run fails. Where it says so, a helper waits for its parent's turn, and its
    parent's turn for the helpers' ends: who comes first must not be chance.
    """

    def __init__(self, stage: Stage, script: Script) -> None:
        # One token at a time: a client that wants one call an answer gets no token more, nor is one made.
        super().__init__(stage, lambda ask: script.reply(stage.read(ask.prompt_ids)), chunk_size=1)  # type: ignore[arg-type]
        self._stage = stage
        self._script = script
        self._arrived: set[str] = set()
        self._ended: set[str] = set()
        self._turns_had: set[int] = set()
        self._moved = asyncio.Condition()
        self.crossed: list[Crossed] = []

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncIterator[Chunk]:
        prompt = self._stage.read(prompt_ids)
        who, turn = self._script.who(prompt), prompt.turn
        crossed = Crossed(prompt_ids.tolist(), who, turn)
        self.crossed.append(crossed)
        await self._wait(who, turn)
        try:
            async for chunk in super().generate(prompt_ids, params, session=session):
                crossed.ids += chunk.ids.tolist()
                yield chunk
        finally:
            # Also where the gateway wants no more of it.
            async with self._moved:
                if who == "main":
                    self._turns_had.add(turn)
                elif who in HELPERS and turn == len(self._script.helper(who)) - 1:
                    self._ended.add(who)
                self._moved.notify_all()

    async def _wait(self, who: str, turn: int) -> None:
        if who in HELPERS and turn == 0:
            async with self._moved:
                self._arrived.add(who)
                self._moved.notify_all()
            if self._script.helpers_meet:
                await self._until(lambda: self._arrived >= set(HELPERS))
            released_by = self._script.released_by.get(who, 0)
            await self._until(lambda: released_by in self._turns_had)
        elif who == "main" and turn == self._script.behind_helpers:
            await self._until(lambda: self._ended >= set(HELPERS))

    async def _until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(MEETING_S), self._moved:
            await self._moved.wait_for(happened)
