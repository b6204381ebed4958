"""Builds the codec and the engines from the options of a command.

API keys are read from the environment, because other users can see a command line. Each key is sent to one
kind of server only: the OpenAI key, which many environments contain, never goes to a vLLM or SGLang server.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from branchline.cli.engine_options import (
    ENGINE_KEY_ENV,
    OPENAI_KEY_ENV,
    UPSTREAM_KEY_ENV_PREFIX,
    EngineOptions,
)
from branchline.core.errors import InputError, MissingExtraError
from branchline.core.extras import requires_extra
from branchline.core.model_folder import MODEL_FILES, find_model_folder

if TYPE_CHECKING:  # imported late below: they need packages of the `serve` extra
    from branchline.chat.base import Codec
    from branchline.engines.base import Engine
    from branchline.engines.http import HttpEngine
    from branchline.engines.upstream_chat import UpstreamChat
    from branchline.runtime.router import Router


def build_router(options: EngineOptions) -> tuple[Codec, Router]:
    """The codec and a router over all engines; raises InputError if an option is missing or malformed."""
    from branchline.runtime.router import Router
    from branchline.runtime.routing_rule import RoutingRule

    codec, engine = _main_engine(options)
    upstreams = dict(map(_parse_upstream, options.upstream))
    rules = [RoutingRule.parse(text) for text in options.rule]
    create_replica = _engine_factory(options) if options.engine in ("vllm", "sglang") else None
    return codec, Router(engine, named_engines=upstreams, rules=rules, create_replica=create_replica)


def _main_engine(options: EngineOptions) -> tuple[Codec, Engine | UpstreamChat]:
    if options.engine == "scripted":
        from branchline.chat.toy import ToyCodec
        from branchline.engines.scripted import ScriptedEngine

        codec = ToyCodec.chatml()
        return codec, ScriptedEngine(codec, lambda prompt: f"You said: {prompt.last_line}")
    if options.engine == "hf":
        return _hf_engine(options)
    _require_url(options)
    if options.engine == "openai":
        return _openai_upstream(options)
    from branchline.engines.replicas import Replicas

    create = _engine_factory(options)
    replicas = Replicas([create(url) for url in options.engine_url], name=options.engine)
    tokenizer = options.tokenizer or options.model or _reported_tokenizer(options)
    return _load_codec(options, tokenizer), replicas


def _openai_upstream(options: EngineOptions) -> tuple[Codec, UpstreamChat]:
    """An upstream as the main engine; without --tokenizer its text is recorded as one token per byte."""
    from branchline.chat.toy import ToyCodec

    if len(options.engine_url) > 1:
        raise InputError("--engine openai: got several --engine-url, expected one; --upstream adds more")
    upstream = _upstream("openai", options.engine_url[0], ENGINE_KEY_ENV)
    codec = _load_codec(options, options.tokenizer) if options.tokenizer else ToyCodec.chatml()
    return codec, upstream


def _require_url(options: EngineOptions) -> None:
    if not options.engine_url:
        raise InputError(f"--engine {options.engine}: expected --engine-url URL, the address of its server")


def _reported_tokenizer(options: EngineOptions) -> Path:
    """The folder of the tokenizer that the servers report; raises InputError if they report several."""
    names = asyncio.run(_request_tokenizer_names(options))
    expected = f"--engine {options.engine}: expected --tokenizer DIR or NAME"
    if len(names) > 1:
        raise InputError(f"{expected}; its servers report several models: {', '.join(names)}")
    (name,) = names
    try:
        folder = find_model_folder(name)
    except InputError as error:
        raise InputError(f"{expected}; the model that its server reports is not here: {error}") from error
    print(f"branchline: using the tokenizer of {name}, the model that the server reports", file=sys.stderr)
    return folder


async def _request_tokenizer_names(options: EngineOptions) -> list[str]:
    """The names that the servers report, each once. A client belongs to one event loop, so these engines are
    not those that will serve."""
    engines = [_engine_factory(options)(url) for url in options.engine_url]
    try:
        return list(dict.fromkeys([await engine.tokenizer_name() for engine in engines]))
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


def _load_codec(options: EngineOptions, tokenizer: str | Path) -> Codec:
    from branchline.chat.generic.codec import GenericCodec

    parsers = {"tool_parser": options.tool_parser, "reasoning_parser": options.reasoning_parser}
    stops = {"stop_ids": list(options.template.stop_id), "no_stop_ids": list(options.template.no_stop_id)}
    if options.codec == "renderers":
        if stop_ids := [*options.template.stop_id, *options.template.no_stop_id]:
            raise InputError(f"--stop-id, --no-stop-id: got {stop_ids}, expected none with --codec renderers")
        if value := options.template.default_chat_template_kwargs:
            raise InputError(
                f"--default-chat-template-kwargs: got {value}, expected none with --codec renderers"
            )
        return _load_renderers_codec(options, tokenizer, parsers)
    return GenericCodec.open(
        tokenizer,
        allow_special_tokens=options.allow_special_tokens,
        default_chat_template_kwargs=options.template.default_chat_template_kwargs,
        **parsers,
        **stops,
    )


def _load_renderers_codec(
    options: EngineOptions, tokenizer: str | Path, parsers: Mapping[str, str | None]
) -> Codec:
    from branchline.chat.renderers_codec.codec import RenderersCodec
    from branchline.chat.renderers_codec.families import FAMILIES

    if not options.family:
        raise InputError(f"--codec renderers: expected --family NAME, one of {', '.join(FAMILIES)}")
    for name, value in parsers.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"{option}: got {value!r}, expected none: --codec renderers has parsers of its own"
            )
    return RenderersCodec.open(tokenizer, options.family, allow_special_tokens=options.allow_special_tokens)


def _hf_engine(options: EngineOptions) -> tuple[Codec, Engine]:
    try:
        with requires_extra():
            from branchline.engines.hf.engine import HfEngine
            from branchline.engines.hf.scheduler import HfConfig
    except MissingExtraError as error:
        raise InputError(f"--engine hf: {error} (--engine scripted needs no model)") from error
    from branchline.engines.smollm2 import smollm2_folder

    # Found once, so that codec and engine use the same commit.
    folder = find_model_folder(options.model, MODEL_FILES) if options.model else smollm2_folder()
    embedded = options.embedded
    config = HfConfig(
        max_batch=embedded.max_batch,
        batch_bytes=_gib(embedded.batch_gib),
        cache_bytes=_gib(embedded.cache_gib),
        prefill_tokens=embedded.prefill_tokens,
        threads=embedded.threads,
    )
    engine = HfEngine.load(folder, config, device=embedded.device, dtype=embedded.dtype)
    return _load_codec(options, options.tokenizer or folder), engine


def _gib(value: float | None) -> int | None:
    return None if value is None else int(value * 2**30)


def _engine_factory(options: EngineOptions) -> Callable[[str], HttpEngine]:
    """Returns a function that makes an engine from the address of its server."""
    from branchline.engines.server_config import ServerConfig
    from branchline.engines.sglang import SglangEngine
    from branchline.engines.vllm import VllmEngine

    engine = VllmEngine if options.engine == "vllm" else SglangEngine
    timeouts = {name: getattr(options, name) for name in ("first_token_timeout_s", "token_timeout_s")}
    return lambda url: engine(ServerConfig(url, api_key=os.environ.get(ENGINE_KEY_ENV, ""), **timeouts))


def engine_keys() -> dict[str, str]:
    """The variables of this process that hold keys of engines, for gateways in other processes."""
    exact = (ENGINE_KEY_ENV, OPENAI_KEY_ENV)
    return {
        name: value
        for name, value in os.environ.items()
        if name in exact or name.startswith(UPSTREAM_KEY_ENV_PREFIX)
    }


def _parse_upstream(text: str) -> tuple[str, UpstreamChat]:
    name, separator, url = text.partition("=")
    if not separator or not name or not url:
        raise InputError(f"--upstream: got {text!r}, expected NAME=URL")
    return name, _upstream(name, url, UPSTREAM_KEY_ENV_PREFIX + re.sub(r"\W", "_", name).upper())


def _upstream(name: str, url: str, key_variable: str) -> UpstreamChat:
    """An upstream with its own key, or with the OpenAI key if its variable is not set (empty: no key)."""
    from branchline.engines.server_config import ServerConfig
    from branchline.engines.upstream_chat import UpstreamChat

    key = os.environ.get(key_variable, os.environ.get(OPENAI_KEY_ENV, ""))
    return UpstreamChat(ServerConfig(url, api_key=key), name=name)
