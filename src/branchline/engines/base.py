"""What an engine is: ids in, ids out, as they are sampled. Only `chat` knows text.

A generation is an async stream of chunks; closing the stream aborts it. Every chunk says which policy
version sampled it, so that weights may change under a running generation. The last chunk, and only the
last, has a finish reason.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from msgspec import Struct

from branchline.core.token_arrays import NO_IDS, Floats, Ids

FinishReason = Literal["stop", "length"]
LogprobKind = Literal["raw", "processed"]

BUFFERED_FLUSH_S = 0.25
"""`flush_s` of a call that is not streamed. From here on engines may also ask their server for larger events."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. The defaults are what training wants: untruncated, unpenalised, temperature 1."""

    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    """Ids that end a generation; the one that did is the last id of the output."""
    grammar: Mapping[str, Any] | None = None
    """A `response_format`, handed to engines that can keep to it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Handed to an HTTP engine as it is."""
    flush_s: float = 0.0
    """The least time between two chunks, so that tokens are coalesced: the first chunk and the last are
    yielded at once, the others carry all that has arrived. 0: every chunk as it arrives."""

    def for_continuation(self, produced: int) -> SamplingParams:
        """What is left to ask for behind ids that were produced already."""
        return replace(self, max_tokens=self.max_tokens - produced)


class Chunk(Struct, frozen=True):
    """The next ids of a generation."""

    ids: Ids = NO_IDS
    logprobs: Floats | None = None
    """One for each id; None where the engine gives none."""
    version: int = 0
    finish_reason: FinishReason | None = None


class Engine(Protocol):
    """Something that samples."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int:
        """The policy version that samples now."""
        ...

    @property
    def logprob_kind(self) -> LogprobKind:
        """`raw`: of the model's own distribution. `processed`: of the one that was sampled from."""
        ...

    @property
    def max_context(self) -> int | None:
        """Prompt and output together may have this many ids; None: not known."""
        ...

    def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """Samples behind a prompt. Closing the stream aborts. Raises EngineError or EngineInputError."""
        ...

    async def ready(self) -> None:
        """Returns when the engine can sample. Raises EngineError if its server does not answer."""
        ...

    def release_session(self, session: str) -> None:
        """Drops what is cached for a session that has ended."""
        ...

    async def pause(self) -> None:
        """Holds every generation where it is; new ones wait. After one that failed, pause again or resume."""
        ...

    async def resume(self, version: int | None = None) -> None:
        """Goes on, under a new version if one is given: held generations continue behind their own ids.

        One that fails leaves them held and the version as it was; it can be tried again.
        """
        ...

    async def close(self) -> None: ...
