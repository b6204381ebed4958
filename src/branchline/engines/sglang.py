"""SGLang over HTTP: `/generate` with `input_ids`, ids and logprobs back as they are sampled.

Follows SGLang's source at v0.5.18 (`managers/io_struct.py`, `managers/tokenizer_manager.py`). A streamed
event repeats all output so far, unless the server runs with `--incremental-streaming-output`; either way
`meta_info.completion_tokens` counts from the start, so what is new in an event is never in doubt.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

from branchline.core.errors import EngineError, EngineInputError
from branchline.core.runs import Ids
from branchline.engines.base import Chunk, Finish, LogprobKind, SamplingParams
from branchline.engines.http import REFUSALS, HttpEngine, Server, error_event

T = TypeVar("T")
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
ABORT_TIMEOUT_S = 5.0
FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}


class FinishReason(Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class MetaInfo(Struct):
    completion_tokens: int = 0
    finish_reason: FinishReason | None = None
    output_token_logprobs: list[tuple[float | None, TokenId, Any]] = []
    """For each token its logprob, its id and, where asked for, its text."""


class Event(Struct):
    output_ids: list[TokenId] = []
    meta_info: MetaInfo | None = None


_read = msgspec.json.Decoder(Event).decode


class SglangEngine(HttpEngine):
    """An SGLang server.

    Its logprobs are of the logits after temperature and penalties and before truncation: `processed`, as
    long as sampling is not truncated. `SGLANG_RETURN_ORIGINAL_LOGPROB=1` at the server makes them `raw`.
    """

    def __init__(
        self,
        server: Server | str,
        *,
        name: str = "",
        version: int = 0,
        logprob_kind: LogprobKind = "processed",
        max_context: int | None = None,
    ) -> None:
        super().__init__(
            server,
            name=name,
            kind="sglang",
            version=version,
            logprob_kind=logprob_kind,
            max_context=max_context,
        )
        self._server_paused = False

    async def ready(self) -> None:
        """Raises EngineError until the server serves; learns its context length. Samples nothing.

        `/health` is not asked: by default it generates a token.
        """
        await self.read_model()

    async def request(self, prompt_ids: Ids, params: SamplingParams) -> AsyncGenerator[Chunk, None]:
        rid = uuid.uuid4().hex
        body = msgspec.json.encode(self._body(rid, prompt_ids, params))
        seen = 0
        last: Chunk | None = None
        try:
            async with aclosing(self.client.events("/generate", body)) as events:
                async for data in events:
                    chunk = self._chunk(data, seen)
                    seen += len(chunk.ids)
                    if chunk.finish is not None:
                        last = chunk
                    elif len(chunk.ids):
                        yield chunk
        except (asyncio.CancelledError, GeneratorExit):
            # We left, so the server need not go on; it may be gone too.
            with suppress(EngineError):
                await self.client.control("/abort_request", {"rid": rid}, timeout_s=ABORT_TIMEOUT_S)
            raise
        if last is not None:
            yield last

    async def pause_server(self) -> None:
        self._server_paused = await self.client.control("/pause_generation", {"mode": "abort"})

    async def resume_server(self, version: int | None) -> None:
        if version is not None:
            told = {"new_version": str(version), "abort_all_requests": False}
            await self.client.control("/update_weight_version", told)
        if self._server_paused:
            self._server_paused = False
            await self.client.control("/continue_generation")

    def _body(self, rid: str, prompt_ids: Ids, params: SamplingParams) -> dict[str, Any]:
        extra = dict(params.extra)
        sampling: dict[str, Any] = {
            **extra.pop("sampling_params", {}),
            **_constraint(params),
            "max_new_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "stop_token_ids": list(params.stop_ids),
        }
        if params.stop:
            sampling["stop"] = list(params.stop)
        if params.seed is not None:
            # Drawn from the seed and a token's position: a continuation needs no other one.
            sampling["sampling_seed"] = params.seed
        return {
            **extra,
            "rid": rid,
            "input_ids": Raw(msgspec.json.encode(prompt_ids.tolist())),
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
            # Keys of old weights must not be found by requests under new ones.
            "extra_key": f"v{self.version}",
        }

    def _chunk(self, data: bytes, seen: int) -> Chunk:
        try:
            event = _read(data)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.name}: {error} in {data[:200]!r}") from error
        meta = event.meta_info
        if meta is None:
            raise error_event(self.name, data)
        finish: Finish | None = None
        if meta.finish_reason is not None:
            finish = FINISHES.get(meta.finish_reason.type)
            if finish is None:
                kind = EngineInputError if meta.finish_reason.status_code in REFUSALS else EngineError
                raise kind(f"{self.name}: {meta.finish_reason.type}: {meta.finish_reason.message}")
        count = meta.completion_tokens
        ids = _news(event.output_ids, seen, count)
        logprobs = _news(meta.output_token_logprobs, seen, count)
        if ids is None or logprobs is None or [one[1] for one in logprobs] != ids:
            raise EngineError(
                f"{self.name}: {len(event.output_ids)} ids and {len(meta.output_token_logprobs)} logprobs in "
                f"an event that counts {count} behind {seen}, expected the same new ones in both"
            )
        return Chunk(
            np.array(ids, np.int32), np.array([one[0] for one in logprobs], np.float32), self.version, finish
        )


def _news(given: list[T], seen: int, count: int) -> list[T] | None:
    """What is new in a list that holds either all `count` items or those behind the `seen` ones."""
    if len(given) == count:
        return given[seen:]
    return given if len(given) == count - seen else None


def _constraint(params: SamplingParams) -> dict[str, str]:
    """A `response_format` as the server's own sampling parameters name it."""
    match dict(params.grammar or {"type": "text"}):
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": '{"type": "object"}'}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json_schema": json.dumps(schema)}
        case {"type": "structural_tag", **tag}:
            return {"structural_tag": json.dumps({"type": "structural_tag", **tag})}
        case other:
            raise EngineInputError(f"response_format: got {other!r}, expected a JSON schema or json_object")
