"""vLLM over HTTP: `/v1/completions` with the prompt as ids, streaming ids and logprobs.

Follows vLLM 0.32.0, against which `make test-vllm` runs it (`return_token_ids`, `cache_salt`,
`stream_interval`, the control endpoints that `VLLM_SERVER_DEV_MODE=1` opens). The server reports the prompt
that it saw; a prompt that differs from ours in any id is an error.

A prompt with images goes to `/inference/v1/generate`, which `--enable-scale-out` opens: with one placeholder
for each image, which the server repeats as its own image processor says, and the images beside the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw, Struct

from branchline.chat.vision import ImageSpan
from branchline.core.errors import EngineError, EngineInputError
from branchline.core.token_arrays import Ids
from branchline.engines.base import (
    BUFFERED_FLUSH_S,
    CONSTRAINT_FIELDS,
    Chunk,
    FinishReason,
    LogprobKind,
    SamplingParams,
)
from branchline.engines.client import ServerConfig
from branchline.engines.error_responses import error_from_event
from branchline.engines.http import (
    STREAM_INTERVAL,
    EngineRequest,
    HttpEngine,
    TokenId,
    check_server_prompt,
    collapse_placeholders,
    to_data_url,
)

NOT_FOUND = 404
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "repetition": "stop"}
_UNEXPECTED_END = "the server ended a generation with"


class VllmLogprobs(Struct):
    token_logprobs: list[float | None] = []


class VllmChoice(Struct):
    index: int = 0
    token_ids: list[TokenId] | None = None
    logprobs: VllmLogprobs | None = None
    finish_reason: str | None = None
    prompt_token_ids: Raw = Raw()


class VllmEvent(Struct):
    choices: list[VllmChoice] | None = None


_decode_event = msgspec.json.Decoder(VllmEvent).decode


@dataclass(eq=False)
class VllmRequest(EngineRequest):
    """A request to `/v1/completions`. Events with an empty `choices` (usage) have no tokens."""

    prompt: bytes = b""

    def read(self, events: Sequence[bytes]) -> None:
        for data in events:
            try:
                choices = _decode_event(data).choices
            except msgspec.DecodeError as error:
                raise EngineError(f"{self.engine}: {error} in {data[:200]!r}") from error
            if choices is None:
                raise error_from_event(self.engine, data)
            for choice in choices:
                seen = bytes(choice.prompt_token_ids)
                is_given = seen not in (b"", b"null", self.prompt)
                if is_given and msgspec.json.decode(seen) != msgspec.json.decode(self.prompt):
                    raise EngineError(
                        f"{self.engine}: the server saw another prompt than the one it was sent"
                    )
                ids, logprobs = choice.token_ids, choice.logprobs.token_logprobs if choice.logprobs else []
                if ids is None:
                    raise EngineError(
                        f"{self.engine}: no token_ids in the stream; vLLM 0.10.2 or later gives them"
                    )
                if len(logprobs) != len(ids) or None in logprobs:
                    raise EngineError(
                        f"{self.engine}: {len(ids)} ids with {len(logprobs)} logprobs, expected one each"
                    )
                if choice.index or (ids and self.finish_reason is not None):
                    raise self.choice_error(choice.index, ids)
                if choice.finish_reason is not None:
                    self.finish_reason = FINISH_REASONS.get(choice.finish_reason)
                    if self.finish_reason is None:
                        raise EngineError(f"{self.engine}: {_UNEXPECTED_END} {choice.finish_reason!r}")
                self.ids += ids
                self.logprobs += logprobs  # type: ignore[arg-type]  # none of them is None


class VllmTokenLogprob(Struct):
    token_id: TokenId
    logprob: float


class VllmTokenLogprobs(Struct):
    content: list[VllmTokenLogprob] | None = None


class VllmTokensChoice(Struct):
    index: int = 0
    token_ids: list[TokenId] | None = None
    logprobs: VllmTokenLogprobs | None = None
    finish_reason: str | None = None


class VllmTokensEvent(Struct):
    choices: list[VllmTokensChoice] | None = None
    prompt_token_ids: list[TokenId] | None = None


_decode_tokens_event = msgspec.json.Decoder(VllmTokensEvent).decode


@dataclass(eq=False)
class VllmImagesRequest(EngineRequest):
    """A request to `/inference/v1/generate`. Its first event has the prompt that the server saw."""

    expected_prompt: Ids | None = None
    """None once the server's prompt was checked."""

    async def next_chunk(self, not_before: float) -> Chunk | None:
        try:
            return await super().next_chunk(not_before)
        except EngineError as error:
            if self.response.status != NOT_FOUND:
                raise
            raise EngineInputError(
                f"images: {self.engine} has no /inference/v1/generate, expected a vLLM server that runs with "
                "--enable-scale-out"
            ) from error

    def read(self, events: Sequence[bytes]) -> None:
        for data in events:
            try:
                event = _decode_tokens_event(data)
            except msgspec.DecodeError as error:
                raise EngineError(f"{self.engine}: {error} in {data[:200]!r}") from error
            if event.choices is None:
                raise error_from_event(self.engine, data)
            if self.expected_prompt is not None:
                check_server_prompt(self.engine, event.prompt_token_ids or (), self.expected_prompt)
                self.expected_prompt = None
            for choice in event.choices:
                ids = choice.token_ids or []
                logprobs = (choice.logprobs.content if choice.logprobs else None) or []
                if [token.token_id for token in logprobs] != ids:
                    raise EngineError(
                        f"{self.engine}: {len(ids)} ids with {len(logprobs)} logprobs, expected one each"
                    )
                if choice.index or (ids and self.finish_reason is not None):
                    raise self.choice_error(choice.index, ids)
                if choice.finish_reason is not None:
                    self.finish_reason = FINISH_REASONS.get(choice.finish_reason)
                    if self.finish_reason is None:
                        raise EngineError(f"{self.engine}: {_UNEXPECTED_END} {choice.finish_reason!r}")
                self.ids += ids
                self.logprobs += [token.logprob for token in logprobs]


class VllmEngine(HttpEngine):
    """A vLLM server. `logprob_kind` is "processed" only if it runs with `--logprobs-mode processed_logprobs`.

    engine = VllmEngine("http://127.0.0.1:8000")
    await engine.ready()
    """

    supports_images = True
    supported_fields = CONSTRAINT_FIELDS - {"custom_params", "custom_logit_processor"}
    kind = "vllm"
    default_logprob_kind = "raw"
    pause_endpoint = ("/pause?mode=abort&clear_cache=true", {})
    resume_endpoint = ("/resume", {})

    def __init__(
        self,
        server: ServerConfig | str,
        *,
        name: str = "",
        model: str = "",
        version: int = 0,
        logprob_kind: LogprobKind | None = None,
        max_context: int | None = None,
    ) -> None:
        super().__init__(
            server, name=name, version=version, logprob_kind=logprob_kind, max_context=max_context
        )
        self.model = model

    async def ready(self) -> None:
        """Raises EngineError until the server answers, then sets `model` and `max_context`."""
        await self.client.get_json("/health")
        model = await self.load_model_info()
        self.model = self.model or model

    async def tokenizer_name(self) -> str:
        """Returns the model that `vllm serve` was started with; a separate `--tokenizer` is not reported."""
        match models := await self.client.get_json("/v1/models"):
            case {"data": [{"root": str(root)}, *_]} if root:
                return root
        raise EngineError(f"{self.name}: /v1/models returned {models!r}, expected the root of a model")

    def build_request(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> EngineRequest:
        if images:
            return self._build_images_request(prompt_ids, params, session, images)
        prompt = self.prompt_encoder.encode(prompt_ids, session)
        body: dict[str, Any] = {
            **params.extra,
            "prompt": Raw(prompt),
            "stream": True,
            "return_token_ids": True,
            **_sampling_params(params, len(prompt_ids)),
            # A request under new weights must not reuse the KV cache of old ones.
            "cache_salt": f"v{self.version}",
        }
        if params.flush_s >= BUFFERED_FLUSH_S:
            body["stream_interval"] = STREAM_INTERVAL  # vLLM before 0.27.0 ignores it.
        if self.model:
            body["model"] = self.model
        if params.grammar is not None:
            kind = params.grammar["type"]
            # What OpenAI's field cannot express has vLLM's own.
            is_own = kind in ("regex", "choice", "grammar")
            name = "structured_outputs" if is_own else "response_format"
            body[name] = {kind: params.grammar[kind]} if is_own else dict(params.grammar)
        response = self.client.request(
            "POST", "/v1/completions", msgspec.json.encode(body), is_generation=True
        )
        return VllmRequest(self.name, response, self.version, params, prompt=prompt)

    def _build_images_request(
        self, prompt_ids: Ids, params: SamplingParams, session: str, images: Sequence[ImageSpan]
    ) -> EngineRequest:
        if params.grammar is not None:
            raise EngineInputError("response_format: got one in a request with images, expected none")
        if "vllm_xargs" in params.extra:
            raise EngineInputError("vllm_xargs: got some in a request with images, expected none")
        sent_ids = collapse_placeholders(prompt_ids, images)
        body: dict[str, Any] = {
            **params.extra,
            "token_ids": Raw(self.prompt_encoder.encode(sent_ids, session)),
            "content_parts": [{"type": "image_url", "url": to_data_url(image.media)} for image in images],
            "sampling_params": _sampling_params(params, len(prompt_ids)),
            "stream": True,
            "return_token_ids": True,
            "cache_salt": f"v{self.version}",
        }
        if self.model:
            body["model"] = self.model
        response = self.client.request(
            "POST", "/inference/v1/generate", msgspec.json.encode(body), is_generation=True
        )
        return VllmImagesRequest(self.name, response, self.version, params, expected_prompt=prompt_ids)


def _sampling_params(params: SamplingParams, prompt_length: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "logprobs": 0,  # Only the sampled token's.
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": list(params.stop_ids),
        "include_stop_str_in_output": True,
    }
    if params.seed is not None:
        # vLLM starts from the seed with each request. Offset by the prompt's length, a continuation does
        # not repeat the random numbers of the first request, and stays reproducible.
        sampling["seed"] = (params.seed + prompt_length) % 2**63
    if params.requested_fields:
        constraints = {
            "ignore_eos": params.ignore_eos,
            "min_tokens": params.min_tokens,
            "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()},
            "allowed_token_ids": list(params.allowed_token_ids),
            "bad_words": list(params.bad_words),
        }
        sampling |= {name: value for name, value in constraints.items() if value}
    return sampling
