"""The engine protocol: token ids in, token ids out, streamed as they are sampled. Only `chat` knows text.

A generation is an async generator of chunks; closing it aborts the generation. Each chunk carries the policy
version that sampled it, so weights may change while a generation runs. The last chunk, and only the last,
has a finish reason.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from msgspec import Struct

from branchline.chat.vision import ImageSpan
from branchline.core.choices import LogprobKind as LogprobKind
from branchline.core.errors import EngineError
from branchline.core.token_arrays import NO_IDS, Floats, Ids

FinishReason = Literal["stop", "length"]

BUFFERED_FLUSH_S = 0.25
"""`flush_s` of a call that is not streamed. From this value on an engine may also ask its server for larger
events."""

GRAMMAR_FIELDS = frozenset(
    {
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "regex",
        "ebnf",
    }
)
"""Fields of a request that constrain an answer to a grammar; a request may have one of them."""
STOP_FIELDS = frozenset({"stop_token_ids", "ignore_eos"})
"""Fields that decide where an answer ends and leave the distribution of its tokens as it is."""
CONSTRAINT_FIELDS = frozenset(
    {
        *GRAMMAR_FIELDS,
        *STOP_FIELDS,
        "logit_bias",
        "min_tokens",
        "bad_words",
        "allowed_token_ids",
        "vllm_xargs",
        "custom_params",
        "custom_logit_processor",
    }
)
"""Fields that change how an answer is sampled and that not every engine supports."""

MIN_TEMPERATURE = 1e-5
"""Sampling is greedy below this temperature: dividing by less could exceed the range of float32."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. The defaults suit training: no truncation, no penalties, temperature 1."""

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
    """Ids that end a generation. The id that ended it is the last id of the output."""
    stop_token_ids: tuple[int, ...] = ()
    """The ids of the request among `stop_ids`."""
    ignore_eos: bool = False
    """The model's own stop ids do not end the generation."""
    min_tokens: int = 0
    """No stop id is sampled before this many tokens."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids."""
    allowed_token_ids: tuple[int, ...] = ()
    """No other ids are sampled; empty: all may be."""
    bad_words: tuple[str, ...] = ()
    """Texts that are not sampled."""
    grammar: Mapping[str, Any] | None = None
    """What an answer must match: a `response_format`, or `{"type": T, T: …}` with T `regex`, `choice` or
    `grammar` (an EBNF text)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields for the request body of an HTTP engine."""
    requested_fields: tuple[str, ...] = ()
    """The CONSTRAINT_FIELDS that are in effect, under the names that the request has for them."""
    vocab_size: int | None = None
    """Output ids must be below it; None: not checked."""
    flush_s: float = 0.0
    """Minimum time between two chunks. The first chunk and the end are yielded at once; each chunk in between
    holds all tokens that arrived meanwhile. 0: tokens are yielded as they arrive."""

    def for_continuation(self, produced: int) -> SamplingParams:
        """The parameters of a request that continues a generation after `produced` tokens."""
        min_tokens = max(0, self.min_tokens - produced)
        return replace(self, max_tokens=self.max_tokens - produced, min_tokens=min_tokens)


class Chunk(Struct, frozen=True):
    """The next tokens of a generation."""

    ids: Ids = NO_IDS
    logprobs: Floats | None = None
    """One for each id, or None if the engine gives none."""
    version: int = 0
    finish_reason: FinishReason | None = None
    num_preempted: int = 0
    """How often the generation was interrupted and continued so far, by memory, a pause or a failure."""


class Engine(Protocol):
    """Samples token ids for a prompt of token ids."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int:
        """The policy version of the weights that sample now."""
        ...

    @property
    def logprob_kind(self) -> LogprobKind:
        """`raw`: under the model's own distribution. `processed`: under the distribution sampled from."""
        ...

    @property
    def logprobs_after_truncation(self) -> bool | None:
        """Whether `processed` logprobs are measured after top-p, top-k and min-p; None if unknown."""
        ...

    @property
    def greedy_logprob_temperature(self) -> float | None:
        """The temperature at which `processed` logprobs of greedy sampling are measured; None if unknown."""
        ...

    @property
    def max_context(self) -> int | None:
        """The maximum number of prompt and output ids together; None if unknown."""
        ...

    @property
    def supports_images(self) -> bool:
        """Whether prompts may have images; those of other engines have none."""
        ...

    @property
    def supported_fields(self) -> frozenset[str]:
        """The CONSTRAINT_FIELDS that it supports; requests with others are refused."""
        ...

    @property
    def constrains_raw_logprobs(self) -> bool:
        """Whether `raw` logprobs are measured after a bias was added and ids were excluded."""
        ...

    def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        """Samples a continuation of the prompt. Closing the generator aborts it.

        `images` are the images of the prompt, in order; their placeholders are among the ids.

        Raises EngineInputError for a request that cannot be served, EngineError if the engine fails.
        """
        ...

    async def ready(self) -> None:
        """Returns when the engine can sample. Raises EngineError if its server does not answer."""
        ...

    def release_session(self, session: str) -> None:
        """Drops what is cached for a session that has ended."""
        ...

    async def pause(self) -> None:
        """Pauses every generation; new ones wait. If it fails, call `pause` again, or `resume`."""
        ...

    async def resume(self, version: int | None = None) -> None:
        """Continues paused generations after their own ids, under a new version if one is given.

        If it fails, generations stay paused, the version is unchanged and `resume` can be called again.
        """
        ...

    async def close(self) -> None: ...


def remaining_request(
    prompt_ids: Ids, params: SamplingParams, yielded: Sequence[Chunk], version: int
) -> tuple[Ids, SamplingParams] | Chunk:
    """Returns the prompt and the parameters of the request that continues a generation after the chunks that
    it has yielded. If no token is left to sample, returns the final chunk, which the engine did not report;
    `version` is its version if nothing was yielded.

    Raises EngineError if a grammar prevents a continuation: an engine matches it against the output of one
    request, and would begin again. Penalties on the output alone do not count tokens from before a
    continuation; `repetition_penalty` counts prompt and output and so includes them.
    """
    ids = np.concatenate([prompt_ids, *[chunk.ids for chunk in yielded]]) if yielded else prompt_ids
    produced = len(ids) - len(prompt_ids)
    version = yielded[-1].version if yielded else version
    if produced and int(ids[-1]) in params.stop_ids:
        return Chunk(version=version, finish_reason="stop")
    if produced >= params.max_tokens:
        return Chunk(version=version, finish_reason="length")
    if not produced:
        return prompt_ids, params
    if params.grammar is not None:
        raise EngineError(f"cannot continue after {produced} ids: the grammar would begin again")
    return ids, params.for_continuation(produced)
