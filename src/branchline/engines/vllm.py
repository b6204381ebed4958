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
from branchline.core.runs import Ids
from branchline.engines.base import Finish, LogprobKind, SamplingParams
from branchline.engines.client import Server, error_event
from branchline.engines.http import GATHERED, Ask, HttpEngine, Reader

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length", "repetition": "stop"}


class Logprobs(Struct):
    token_logprobs: list[float | None] = []


class Choice(Struct):
    token_ids: list[TokenId] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    prompt_token_ids: Raw = Raw()


class Event(Struct):
    choices: list[Choice] | None = None


_PROMPT_KEY = b'"prompt_token_ids":'
_read = msgspec.json.Decoder(Event).decode


class VllmReader(Reader):
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
                data = self._without_prompt(data)
            try:
                choices = _read(data).choices
            except msgspec.DecodeError as error:
                raise EngineError(f"{self._engine}: {error} in {data[:200]!r}") from error
            if choices is None:
                raise error_event(self._engine, data)
            for choice in choices:
                if choice.prompt_token_ids:
                    self._compare(bytes(choice.prompt_token_ids))
                ids, logprobs = choice.token_ids, choice.logprobs.token_logprobs if choice.logprobs else []
                if ids is None or len(logprobs) != len(ids) or None in logprobs:
                    raise self._incomplete(ids, logprobs)
                if choice.finish_reason is not None:
                    self._end(choice.finish_reason)
                self.ids += ids
                self.logprobs += logprobs  # type: ignore[arg-type]  # none of them is None

    def _incomplete(self, ids: list[int] | None, logprobs: Sequence[float | None]) -> EngineError:
        if ids is None:
            return EngineError(f"{self._engine}: no token_ids in the stream; vLLM 0.10.2 or later gives them")
        return EngineError(f"{self._engine}: {len(ids)} ids with {len(logprobs)} logprobs, expected one each")

    def _end(self, reason: str) -> None:
        self.finish = FINISHES.get(reason)
        if self.finish is None:
            raise EngineError(f"{self._engine}: the server ended a generation by {reason!r}")

    def _without_prompt(self, data: bytes) -> bytes:
        """The first event repeats the prompt: what is ours to the last byte need not be parsed.

        Inside a text the key's second quote would be escaped, so this is the key.
        """
        before, key, behind = data.partition(_PROMPT_KEY)
        if not behind.startswith(self._prompt):
            return data
        return b"".join((before, key, b"null", behind[len(self._prompt) :]))

    def _compare(self, seen: bytes) -> None:
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
        server: Server | str,
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
        await self.client.get("/health")
        served = await self.read_model()
        self.model = self.model or served

    def ask(self, prompt_ids: Ids, params: SamplingParams, session: str = "") -> Ask:
        prompt = self.prompts.write(prompt_ids, session)
        body = self._body(Raw(prompt), len(prompt_ids), params)
        return Ask("/v1/completions", msgspec.json.encode(body), VllmReader(self.name, prompt))

    async def pause_server(self) -> None:
        self._server_paused = True  # until it says otherwise: an answer may be lost
        self._server_paused = await self.client.control("/pause?mode=abort&clear_cache=true")

    async def resume_server(self, version: int | None) -> None:
        if version is not None:
            await self.client.control("/update_weight_version", {"new_version": str(version)})
        if self._server_paused:
            await self.client.control("/resume")
            self._server_paused = False

    async def sleep(self, level: int = 1) -> bool:
        """Pauses, then frees the server's memory; False where it cannot (not `--enable-sleep-mode`)."""
        await self.pause()
        return await self.client.control(f"/sleep?level={level}")

    async def wake_up(self) -> bool:
        """Takes the memory back. Generations go on when `resume` is called, with the weights in place."""
        return await self.client.control("/wake_up")

    def _body(self, prompt: Raw, length: int, params: SamplingParams) -> dict[str, Any]:
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
        if params.whole:
            body["stream_interval"] = GATHERED  # Read since v0.27.0; before, and harmlessly, not.
        if self.model:
            body["model"] = self.model
        if params.seed is not None:
            # A server draws anew from the seed with each request: moved by the prompt's length, a
            # continuation does not draw the noise of its beginning again, and stays reproducible.
            body["seed"] = (params.seed + length) % 2**63
        if params.stop:
            body["stop"] = list(params.stop)
        if params.grammar is not None:
            body["response_format"] = dict(params.grammar)
        return body
