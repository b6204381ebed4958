"""The codec and the engines that `branchline serve`'s options name."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from branchline.chat.base import Codec
from branchline.core.errors import InputError

if TYPE_CHECKING:
    from branchline.engines.base import Engine
    from branchline.engines.upstream_chat import UpstreamChat
    from branchline.runtime.router import Router

ENGINE_NAMES = ("hf", "vllm", "sglang", "scripted", "openai")
# Keys come from the environment: a command line is for everybody to read. Each goes where it belongs and
# nowhere else: OpenAI's is found in many environments, and our own servers have no business with it.
ENGINE_KEY_ENV = "BRANCHLINE_ENGINE_KEY"
UPSTREAM_KEY_ENV_PREFIX = "BRANCHLINE_UPSTREAM_KEY_"
OPENAI_KEY_ENV = "OPENAI_API_KEY"


def build_router(options: argparse.Namespace) -> tuple[Codec, Router]:
    """What serves, by the options; refuses what is missing before anything is started."""
    from branchline.runtime.router import Router, RoutingRule

    codec, engine = _main_engine(options)
    others = dict(map(_parse_upstream, options.upstream))
    rules = [RoutingRule.parse(text) for text in options.rule]
    make = _engine_factory(options.engine) if options.engine in ("vllm", "sglang") else None
    return codec, Router(engine, named_engines=others, rules=rules, create_replica=make)


def _main_engine(options: argparse.Namespace) -> tuple[Codec, Engine | UpstreamChat]:
    if options.engine == "scripted":
        from branchline.chat.toy import ToyCodec
        from branchline.engines.scripted import ScriptedEngine

        toy = ToyCodec.chatml()
        return toy, ScriptedEngine(toy, lambda ask: f"You said: {ask.last_line}")
    if options.engine == "hf":
        return _hf_engine(options)
    _require_url(options)
    if options.engine == "openai":
        if len(options.engine_url) > 1:
            raise InputError("--engine openai: got several --engine-url, expected one; --upstream adds more")
        upstream = _upstream("openai", options.engine_url[0], ENGINE_KEY_ENV)
        return _load_codec(options) if options.tokenizer else _byte_codec(), upstream
    from branchline.engines.replicas import Replicas

    make = _engine_factory(options.engine)
    replicas = Replicas([make(url) for url in options.engine_url], name=options.engine)
    return _load_codec(options), replicas


def _byte_codec() -> Codec:
    """For capture without a tokenizer: text is kept to the letter, and a byte stands for a token."""
    from branchline.chat.toy import ToyCodec

    return ToyCodec.chatml()


def _require_url(options: argparse.Namespace) -> None:
    if not options.engine_url:
        raise InputError(f"--engine {options.engine}: expected --engine-url URL, the address of its server")
    if options.engine != "openai" and not (options.tokenizer or options.model):
        raise InputError(
            f"--engine {options.engine}: expected --tokenizer DIR or --model DIR, the files of the model "
            "that the server has"
        )


def _load_codec(options: argparse.Namespace, folder: Path | None = None) -> Codec:
    from branchline.chat.generic.codec import GenericCodec

    parsers = {"tool_parser": options.tool_parser, "reasoning_parser": options.reasoning_parser}
    return GenericCodec.open(options.tokenizer or folder or options.model, **parsers)


def _hf_engine(options: argparse.Namespace) -> tuple[Codec, Engine]:
    try:
        from branchline.engines.hf.engine import HfEngine
    except ImportError as error:
        raise InputError(
            f"--engine hf needs torch and transformers ({error.name} is missing): "
            "pip install 'branchline[hf]'; --engine scripted needs neither"
        ) from error
    from branchline.engines.smollm2 import smollm2_folder

    folder = options.model or smollm2_folder()
    return _load_codec(options, folder), HfEngine.load(folder)


def _engine_factory(kind: str) -> Callable[[str], Engine]:
    from branchline.engines.client import ServerConfig
    from branchline.engines.sglang import SglangEngine
    from branchline.engines.vllm import VllmEngine

    engine = VllmEngine if kind == "vllm" else SglangEngine
    return lambda url: engine(ServerConfig(url, api_key=os.environ.get(ENGINE_KEY_ENV, "")))


def _parse_upstream(text: str) -> tuple[str, UpstreamChat]:
    name, separator, url = text.partition("=")
    if not separator or not name or not url:
        raise InputError(f"--upstream: got {text!r}, expected NAME=URL")
    return name, _upstream(name, url, UPSTREAM_KEY_ENV_PREFIX + re.sub(r"\W", "_", name).upper())


def _upstream(name: str, url: str, key_name: str) -> UpstreamChat:
    """An upstream with the key that is meant for it, else OpenAI's; one set to nothing is none at all."""
    from branchline.engines.client import ServerConfig
    from branchline.engines.upstream_chat import UpstreamChat

    key = os.environ.get(key_name, os.environ.get(OPENAI_KEY_ENV, ""))
    return UpstreamChat(ServerConfig(url, api_key=key), name=name)
