"""SGLang over HTTP: `/generate` with `input_ids`, streaming ids and logprobs.

Follows SGLang's source at v0.5.18 (`managers/io_struct.py`, `managers/tokenizer_manager.py`). An event
repeats all output so far, unless the server runs with `--incremental-streaming-output`; in both cases
`meta_info.completion_tokens` counts from the start, which tells the new tokens of an event.

Images are sent as `image_data`, with one placeholder each among the ids. SGLang decodes and encodes such a
prompt again unless it runs with `SGLANG_MM_AVOID_RETOKENIZE=1`; it reports the prompt that it saw, and one
that differs from ours in any id is an error.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Raw, Struct

from branchline.chat.vision import ImageSpan
from branchline.core.errors import EngineError, EngineInputError
from branchline.core.token_arrays import Ids
from branchline.engines.base import BUFFERED_FLUSH_S, CONSTRAINT_FIELDS, FinishReason, SamplingParams
from branchline.engines.error_responses import INVALID_REQUEST_STATUSES, error_from_event
from branchline.engines.http import (
    STREAM_INTERVAL,
    EngineRequest,
    HttpEngine,
    TokenId,
    check_server_prompt,
    collapse_placeholders,
    to_data_url,
)

T = TypeVar("T")
ABORT_TIMEOUT_S = 5.0
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class SglangFinishReason(Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class SglangMetaInfo(Struct):
    completion_tokens: int = 0
    finish_reason: SglangFinishReason | None = None
    output_token_logprobs: list[tuple[float, TokenId, Any]] = []
    """The logprob, id and text of each token; the text is null unless requested."""


class SglangEvent(Struct):
    prompt_token_ids: list[TokenId] | None = None
    output_ids: list[TokenId] = []
    meta_info: SglangMetaInfo | None = None


_decode_event = msgspec.json.Decoder(SglangEvent).decode


@dataclass(eq=False)
class SglangRequest(EngineRequest):
    """A request to `/generate`."""

    read_count: int = 0
    expected_prompt: Ids | None = None
    """The prompt that the server must report, if it has images; None once it was checked."""

    def read(self, events: Sequence[bytes]) -> None:
        if len(events) > 1 and _is_cumulative(events[-1]):
            events = events[-1:]
        for data in events:
            try:
                event = _decode_event(data)
            except msgspec.DecodeError as error:
                raise EngineError(f"{self.engine}: {error} in {data[:200]!r}") from error
            if event.meta_info is None:
                raise error_from_event(self.engine, data)
            if self.expected_prompt is not None:
                self._check_prompt(event, self.expected_prompt)
            self._append(event.output_ids, event.meta_info)

    def _check_prompt(self, event: SglangEvent, expected: Ids) -> None:
        if event.prompt_token_ids is None:
            raise EngineError(
                f"{self.engine}: no prompt_token_ids in the stream, expected those of a prompt with images"
            )
        check_server_prompt(self.engine, event.prompt_token_ids, expected)
        self.expected_prompt = None

    def _append(self, output_ids: list[int], meta: SglangMetaInfo) -> None:
        reason = meta.finish_reason
        finish = None if reason is None else FINISH_REASONS.get(reason.type)
        if reason is not None and finish is None:
            kind = EngineInputError if reason.status_code in INVALID_REQUEST_STATUSES else EngineError
            raise kind(f"{self.engine}: {reason.type}: {reason.message}")
        count = meta.completion_tokens
        ids = _new_items(output_ids, self.read_count, count)
        logprobs = _new_items(meta.output_token_logprobs, self.read_count, count)
        if ids is None or logprobs is None or [token_id for _, token_id, _ in logprobs] != ids:
            raise EngineError(
                f"{self.engine}: {len(output_ids)} ids and {len(meta.output_token_logprobs)} logprobs in "
                f"an event that counts {count} after {self.read_count}, expected the same new tokens in both"
            )
        self.ids += ids
        self.logprobs += [logprob for logprob, _, _ in logprobs]
        self.finish_reason = finish or self.finish_reason
        self.read_count = count


class SglangEngine(HttpEngine):
    """An SGLang server.

    Its logprobs are taken after temperature and penalties and before truncation, so they are `processed` as
    long as sampling is not truncated; those of greedy sampling are taken at temperature 1.
    `SGLANG_RETURN_ORIGINAL_LOGPROB=1` at the server makes them `raw`.
    """

    supports_images = True
    supported_fields = CONSTRAINT_FIELDS - {"bad_words", "allowed_token_ids", "vllm_xargs"}
    constrains_raw_logprobs = True
    kind = "sglang"
    default_logprob_kind = "processed"
    logprobs_after_truncation = False
    pause_endpoint = ("/pause_generation", {"mode": "abort"})
    resume_endpoint = ("/continue_generation", {})
    version_options: ClassVar[Mapping[str, Any]] = {"abort_all_requests": False}

    async def ready(self) -> None:
        """Raises EngineError until the server answers, then sets `max_context`. Does not request `/health`,
        which generates a token by default."""
        await self.load_model_info()

    async def tokenizer_name(self) -> str:
        match info := await self.client.get_json("/get_model_info"):
            case {"tokenizer_path": str(path)} | {"model_path": str(path)} if path:
                return path
        raise EngineError(f"{self.name}: /get_model_info returned {info!r}, expected a tokenizer_path")

    def build_request(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> EngineRequest:
        rid = uuid.uuid4().hex
        extra = dict(params.extra)
        sampling: dict[str, Any] = {
            **extra.pop("sampling_params", {}),
            **_structured_output_params(params),
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
        if params.requested_fields:
            constraints = {
                "ignore_eos": params.ignore_eos,
                "min_new_tokens": params.min_tokens,
                "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()},
                "custom_params": extra.pop("custom_params", None),
            }
            sampling |= {name: value for name, value in constraints.items() if value}
        if params.flush_s >= BUFFERED_FLUSH_S:
            sampling["stream_interval"] = STREAM_INTERVAL
        if params.seed is not None:
            # SGLang hashes the seed with a token's position, so a continuation keeps the same seed.
            sampling["sampling_seed"] = params.seed
        sent_ids = collapse_placeholders(prompt_ids, images) if images else prompt_ids
        body = {
            **extra,
            "rid": rid,
            "input_ids": Raw(self.prompt_encoder.encode(sent_ids, session)),
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
            # A request under new weights must not reuse the KV cache of old ones.
            "extra_key": f"v{self.version}",
        }
        if images:
            body["image_data"] = [to_data_url(image.media) for image in images]
            body["return_prompt_token_ids"] = True
        response = self.client.request("POST", "/generate", msgspec.json.encode(body))
        expected = prompt_ids if images else None
        return SglangRequest(self.name, response, self.version, rid, expected_prompt=expected)

    async def abort_at_server(self, request: EngineRequest) -> None:
        with suppress(EngineError):  # The server may be gone.
            body = {"rid": request.request_id}
            await self.client.post_control("/abort_request", body, timeout_s=ABORT_TIMEOUT_S)


def _is_cumulative(data: bytes) -> bool:
    """Whether an event repeats all output so far, so that the events before it need not be read."""
    try:
        event = _decode_event(data)
    except msgspec.DecodeError:
        return False
    meta = event.meta_info
    if meta is None or (meta.finish_reason is not None and meta.finish_reason.type not in FINISH_REASONS):
        return False
    return len(event.output_ids) == meta.completion_tokens


def _new_items(items: list[T], read: int, count: int) -> list[T] | None:
    """The new items of a list that holds either all `count` items or those after the first `read`; None if
    its length fits neither."""
    if len(items) == count:
        return items[read:]
    return items if len(items) == count - read else None


def _structured_output_params(params: SamplingParams) -> dict[str, str]:
    """A `response_format` as SGLang sampling parameters."""
    match dict(params.grammar or {"type": "text"}):
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": '{"type": "object"}'}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json_schema": json.dumps(schema)}
        case {"type": "structural_tag", **tag}:
            return {"structural_tag": json.dumps({"type": "structural_tag", **tag})}
        case {"type": "regex", "regex": regex}:
            return {"regex": regex}
        case {"type": "choice", "choice": choices}:
            return {"ebnf": "root ::= " + " | ".join([json.dumps(choice) for choice in choices])}
        case {"type": "grammar", "grammar": grammar}:
            return {"ebnf": grammar}
        case other:
            raise EngineInputError(f"response_format: got {other!r}, expected a JSON schema or json_object")
