"""vLLM over HTTP: `/v1/completions` with the prompt as ids, ids and logprobs back as they are sampled.

Follows vLLM 0.32.0, which `make test-vllm` runs it against (`return_token_ids`, `cache_salt`,
`stream_interval`, the control endpoints that `VLLM_SERVER_DEV_MODE=1` opens). The server says which prompt it
saw, and a prompt that is not ours to the last id is an error, not a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from branchline.core.errors import EngineError
from branchline.core.token_arrays import Ids
from branchline.engines.base import BUFFERED_FLUSH_S, FinishReason, LogprobKind, SamplingParams
from branchline.engines.client import ServerConfig, error_from_event
from branchline.engines.http import STREAM_INTERVAL, EngineRequest, HttpEngine, OutputReader

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "repetition": "stop"}


class VllmLogprobs(Struct):
    token_logprobs: list[float | None] = []


class VllmChoice(Struct):
    token_ids: list[TokenId] | None = None
    logprobs: VllmLogprobs | None = None
    finish_reason: str | None = None
    prompt_token_ids: Raw = Raw()


class VllmEvent(Struct):
    choices: list[VllmChoice] | None = None


_PROMPT_KEY = b'"prompt_token_ids":'
_decode_event = msgspec.json.Decoder(VllmEvent).decode


class VllmReader(OutputReader):
    """Reads `/v1/completions`. Events without choices (usage) say nothing about ids."""

    def __init__(self, engine: str, prompt: bytes) -> None:
        super().__init__()
        self._engine = engine
        self._prompt = prompt
        self._is_first = True

    def read(self, events: Sequence[bytes]) -> None:
        for data in events:
            if self._is_first:
                self._is_first = False
                data = self._strip_prompt(data)
            try:
                choices = _decode_event(data).choices
            except msgspec.DecodeError as error:
                raise EngineError(f"{self._engine}: {error} in {data[:200]!r}") from error
            if choices is None:
                raise error_from_event(self._engine, data)
            for choice in choices:
                if choice.prompt_token_ids:
                    self._check_prompt(bytes(choice.prompt_token_ids))
                ids, logprobs = choice.token_ids, choice.logprobs.token_logprobs if choice.logprobs else []
                if ids is None or len(logprobs) != len(ids) or None in logprobs:
                    raise self._incomplete_error(ids, logprobs)
                if choice.finish_reason is not None:
                    self._set_finish_reason(choice.finish_reason)
                self.ids += ids
                self.logprobs += logprobs  # type: ignore[arg-type]  # none of them is None

    def _incomplete_error(self, ids: list[int] | None, logprobs: Sequence[float | None]) -> EngineError:
        if ids is None:
            return EngineError(f"{self._engine}: no token_ids in the stream; vLLM 0.10.2 or later gives them")
        return EngineError(f"{self._engine}: {len(ids)} ids with {len(logprobs)} logprobs, expected one each")

    def _set_finish_reason(self, reason: str) -> None:
        self.finish_reason = FINISH_REASONS.get(reason)
        if self.finish_reason is None:
            raise EngineError(f"{self._engine}: the server ended a generation by {reason!r}")

    def _strip_prompt(self, data: bytes) -> bytes:
        """The first event repeats the prompt: what is ours to the last byte need not be parsed.

        Inside a text the key's second quote would be escaped, so this is the key.
        """
        before, key, behind = data.partition(_PROMPT_KEY)
        if not behind.startswith(self._prompt):
            return data
        return b"".join((before, key, b"null", behind[len(self._prompt) :]))

    def _check_prompt(self, seen: bytes) -> None:
        if seen not in (self._prompt, b"null") and msgspec.json.decode(seen) != msgspec.json.decode(
            self._prompt
        ):
            raise EngineError(f"{self._engine}: the server saw another prompt than the one it was sent")


class VllmEngine(HttpEngine):
    """A vLLM server. `logprob_kind` is "processed" only if it runs with `--logprobs-mode processed_logprobs`.

    engine = VllmEngine("http://127.0.0.1:8000")
    await engine.ready()
    """

    def __init__(
        self,
        server: ServerConfig | str,
        *,
        name: str = "",
        model: str = "",
        version: int = 0,
        logprob_kind: LogprobKind = "raw",
        max_context: int | None = None,
    ) -> None:
        super().__init__(
            server,
            name=name,
            kind="vllm",
            version=version,
            logprob_kind=logprob_kind,
            max_context=max_context,
        )
        self.model = model
        self._server_paused = False

    async def ready(self) -> None:
        """Raises EngineError until the server serves; learns its model and length. Samples nothing."""
        await self.client.get_json("/health")
        served = await self.load_model_info()
        self.model = self.model or served

    def build_request(self, prompt_ids: Ids, params: SamplingParams, session: str = "") -> EngineRequest:
        prompt = self.prompt_encoder.encode(prompt_ids, session)
        body = self._request_body(Raw(prompt), len(prompt_ids), params)
        return EngineRequest("/v1/completions", msgspec.json.encode(body), VllmReader(self.name, prompt))

    async def pause_server(self) -> None:
        self._server_paused = True  # until it says otherwise: an answer may be lost
        self._server_paused = await self.client.post_control("/pause?mode=abort&clear_cache=true")

    async def resume_server(self, version: int | None) -> None:
        if version is not None:
            await self.client.post_control("/update_weight_version", {"new_version": str(version)})
        if self._server_paused:
            await self.client.post_control("/resume")
            self._server_paused = False

    async def sleep(self, level: int = 1) -> bool:
        """Pauses, then frees the server's memory; False where it cannot (not `--enable-sleep-mode`)."""
        await self.pause()
        return await self.client.post_control(f"/sleep?level={level}")

    async def wake_up(self) -> bool:
        """Takes the memory back. Generations go on when `resume` is called, with the weights in place."""
        return await self.client.post_control("/wake_up")

    def _request_body(self, prompt: Raw, length: int, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            **params.extra,
            "prompt": prompt,
            "stream": True,
            "return_token_ids": True,
            "logprobs": 0,  # Of the sampled token alone.
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
            # Keys of old weights must not be found by requests under new ones.
            "cache_salt": f"v{self.version}",
        }
        if params.flush_s >= BUFFERED_FLUSH_S:
            body["stream_interval"] = STREAM_INTERVAL  # Read since v0.27.0; before, and harmlessly, not.
        if self.model:
            body["model"] = self.model
        if params.seed is not None:
            # A server draws anew from the seed with each request: moved by the prompt's length, a
            # continuation does not draw the noise of its beginning again, and stays reproducible.
            body["seed"] = (params.seed + length) % 2**63
        if params.grammar is not None:
            body["response_format"] = dict(params.grammar)
        return body
