"""SGLang over HTTP: `/generate` with `input_ids`, streaming ids and logprobs.

Follows SGLang's source at v0.5.18 (`managers/io_struct.py`, `managers/tokenizer_manager.py`). An event
repeats all output so far, unless the server runs with `--incremental-streaming-output`; in both cases
`meta_info.completion_tokens` counts from the start, which tells the new tokens of an event.

Tokens carry the policy version that the server reports as `meta_info.weight_version`, if it is a number: a
trainer may change the weights without us. A prompt that the server cut is an error.

Images are sent as `image_data`, with one placeholder each among the ids. SGLang decodes and encodes such a
prompt again unless it runs with `SGLANG_MM_AVOID_RETOKENIZE=1`; it reports the prompt that it saw, and one
that differs from ours in any id is an error.
"""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Raw, Struct

from branchline.chat.vision import ImageSpan
from branchline.core.errors import (
    ContextLengthError,
    EngineError,
    EngineInputError,
    EngineUnavailableError,
)
from branchline.core.token_arrays import Ids
from branchline.engines.base import BUFFERED_FLUSH_S, CONSTRAINT_FIELDS, FinishReason, SamplingParams
from branchline.engines.error_responses import error_from_event, error_from_response
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
ADAPTIVE_RESERVED_TOKENS = 32
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class SglangFinishReason(Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class SglangMetaInfo(Struct):
    prompt_tokens: int | None = None
    weight_version: str | int | None = None
    """What `/update_weight_version` or a weight update set; "default" at first."""
    completion_tokens: int = 0
    finish_reason: SglangFinishReason | None = None
    output_token_logprobs: list[tuple[float, TokenId, Any]] = []
    """The logprob, id and text of each token; the text is null unless requested."""


class SglangEvent(Struct):
    index: int = 0
    """The position in a batch; a request has only one prompt."""
    prompt_token_ids: list[TokenId] | None = None
    output_ids: list[TokenId] = []
    meta_info: SglangMetaInfo | None = None


_decode_event = msgspec.json.Decoder(SglangEvent).decode


@dataclass(eq=False)
class SglangRequest(EngineRequest):
    """A request to `/generate`."""

    server: SglangEngine = field(kw_only=True)
    prompt_length: int | None = None
    """The number of prompt ids that the server must report; None if the prompt has images."""
    read_count: int = 0
    expected_prompt: Ids | None = None
    """The prompt that the server must report, if it has images; None once it was checked."""

    def __post_init__(self) -> None:
        self._oldest_version = self.version
        self._weight_version: str | int | None = None
        """What the last event reported."""

    def read(self, events: Sequence[bytes]) -> None:
        if len(events) > 1 and self._repeats_all(events):
            events = events[-1:]
        for data in events:
            try:
                event = _decode_event(data)
            except msgspec.DecodeError as error:
                raise EngineError(f"{self.engine}: {error} in {data[:200]!r}") from error
            meta = event.meta_info
            if meta is None:
                # Older versions send errors without a code, and only those of a request.
                raise error_from_event(self.engine, data, default_status=400)
            if self.expected_prompt is not None:
                self._check_prompt(event, self.expected_prompt)
            elif meta.prompt_tokens is not None and self.prompt_length not in (None, meta.prompt_tokens):
                raise self._prompt_length_error(meta.prompt_tokens)
            if meta.weight_version is not None:
                self._set_weight_version(meta.weight_version)
            self._append(event, meta)

    def _repeats_all(self, events: Sequence[bytes]) -> bool:
        """Whether the last event repeats all output so far, and no event before it has a finish reason or
        another weight version. Then those need not be read."""
        try:
            event = _decode_event(events[-1])
            meta = event.meta_info
            if meta is None:
                return False
            label = meta.weight_version
            if self._weight_version is None and label is not None:
                first = _decode_event(events[0]).meta_info
                self._weight_version = None if first is None else first.weight_version
        except msgspec.DecodeError:
            return False
        is_end = meta.finish_reason is None or meta.finish_reason.type in FINISH_REASONS
        if not is_end or label != self._weight_version or any(b'"type"' in data for data in events[:-1]):
            return False
        return len(event.output_ids) == meta.completion_tokens

    def _prompt_length_error(self, seen: int) -> EngineError:
        sent = self.prompt_length or 0
        if seen < sent:  # The server runs with --allow-auto-truncate.
            return ContextLengthError.for_prompt(sent, seen)
        return EngineError(f"{self.engine}: the server saw a prompt of {seen} ids, expected {sent}")

    def _set_weight_version(self, reported: str | int) -> None:
        """Tokens from here on have the version that the server reports; those read before keep theirs."""
        label, last = str(reported), self.server.weight_label
        if not label.isdecimal():
            if last not in ("", label):
                raise EngineError(
                    f"{self.engine}: weight_version: got {label!r} after {last!r}, expected a number: "
                    "the server has other weights, of unknown version"
                )
        elif int(label) != self.version:
            if int(label) < self._oldest_version:
                raise EngineError(
                    f"{self.engine}: weight_version: got {label!r}, expected {self._oldest_version} or "
                    "later: the server has older weights than those of its last update"
                )
            if self.ids:
                self._append_chunk()
            self.version = int(label)
            self.server.version = max(self.server.version, self.version)
        self.server.weight_label, self._weight_version = label, reported

    def _check_prompt(self, event: SglangEvent, expected: Ids) -> None:
        if event.prompt_token_ids is None:
            raise EngineError(
                f"{self.engine}: no prompt_token_ids in the stream, expected those of a prompt with images"
            )
        check_server_prompt(self.engine, event.prompt_token_ids, expected)
        self.expected_prompt = None

    def _append(self, event: SglangEvent, meta: SglangMetaInfo) -> None:
        reason = meta.finish_reason
        finish = None if reason is None else FINISH_REASONS.get(reason.type)
        if reason is not None and finish is None:
            message = msgspec.json.encode({"message": f"{reason.type}: {reason.message}"})
            raise error_from_response(self.engine, reason.status_code or 500, message)
        count = meta.completion_tokens
        ids = _new_items(event.output_ids, self.read_count, count)
        logprobs = _new_items(meta.output_token_logprobs, self.read_count, count)
        if ids is None or logprobs is None or [token_id for _, token_id, _ in logprobs] != ids:
            counts = f"{len(event.output_ids)} ids and {len(meta.output_token_logprobs)} logprobs"
            raise EngineError(
                f"{self.engine}: {counts} in an event that counts {count} after {self.read_count}, expected "
                "the same new tokens in both"
            )
        if event.index or (ids and self.finish_reason is not None):
            raise self.choice_error(event.index, ids)
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

    weight_label = ""
    """The last `weight_version` that the server reported."""

    async def ready(self) -> None:
        """Raises EngineError until the server answers, then sets `max_context`. Does not request `/health`,
        which generates a token by default."""
        is_known = self.max_context is not None
        await self.load_model_info()
        if not is_known and self.max_context is not None:
            self.max_context -= await self._reserved_tokens()

    async def _reserved_tokens(self) -> int:
        """Returns how many tokens of the context speculative decoding reserves in every request: the server
        refuses a request for all that its prompt leaves."""
        info: Any = None
        for path in ("/server_info", "/get_server_info"):
            try:
                info = await self.client.get_json(path)
                break
            except EngineUnavailableError:
                raise
            except EngineError:
                continue  # Older versions have only the second; both may be closed to us.
        if not isinstance(info, dict) or not info.get("speculative_algorithm"):
            return 0
        names = ("speculative_eagle_topk", "speculative_num_steps", "speculative_num_draft_tokens")
        topk, steps, drafts = (info.get(name) or 0 for name in names)
        # With the adaptive mode the steps can become more than these.
        return max(topk * steps, drafts, ADAPTIVE_RESERVED_TOKENS if info.get("speculative_adaptive") else 0)

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
        # SGLang hashes the seed with a token's position, so a continuation keeps the same seed. Its
        # deterministic mode gives all requests without a seed the same one, and so the same output.
        sampling["sampling_seed"] = secrets.randbits(62) if params.seed is None else params.seed
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
        response = self.client.request("POST", "/generate", msgspec.json.encode(body), is_generation=True)
        return SglangRequest(
            self.name,
            response,
            self.version,
            params,
            rid,
            server=self,
            prompt_length=None if images else len(prompt_ids),
            expected_prompt=prompt_ids if images else None,
        )

    async def abort_at_server(self, request: EngineRequest) -> None:
        with suppress(EngineError):  # The server may be gone.
            body = {"rid": request.request_id}
            await self.client.post_control("/abort_request", body, timeout_s=ABORT_TIMEOUT_S)


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
