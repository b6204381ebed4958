"""The engine of a training run, whose samples follow from the run's seed, the session's id and the prompt.

A run that is repeated or resumed samples the same tokens, in whatever order its requests arrive. A prompt
that a session sends again is sampled with another seed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from branchline.chat.vision import ImageSpan
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.hf.engine import HfEngine


class SeededEngine(HfEngine):
    """An embedded engine that chooses the seeds of requests that have none."""

    def __init__(self, model: Any, *args: Any, run_seed: int = 0, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self._run_seed = run_seed
        self._prompt_counts: dict[str, Counter[bytes]] = {}

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        if params.seed is None:
            digest = hashlib.blake2b(f"{self._run_seed} {session} ".encode() + prompt_ids.tobytes()).digest()
            counts = self._prompt_counts.setdefault(session, Counter())
            params = replace(params, seed=int.from_bytes(digest[:8], "little") + counts[digest])
            counts[digest] += 1
        stream = super().generate(prompt_ids, params, session=session, images=images)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            await stream.aclose()

    def release_session(self, session: str) -> None:
        self._prompt_counts.pop(session, None)
        super().release_session(session)
