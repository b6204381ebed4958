"""`branchline serve`: the gateway from a command line, with an engine chosen by name."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branchline.chat.base import Codec
from branchline.core.errors import InputError
from branchline.core.runs import as_ids

if TYPE_CHECKING:
    from branchline.engines.base import Engine
    from branchline.gateway.server import Gateway

ENGINES = ("scripted", "hf", "vllm", "sglang")

_EPILOG = """\
examples:
  branchline serve --engine scripted
      no model at all: replies by rule, to try a client or a protocol
  branchline serve --engine vllm --engine-url http://127.0.0.1:8000 --tokenizer ~/models/Qwen3-8B
      in front of a vLLM server that has the same model; give --engine-url again for each replica
  branchline serve --engine hf --model ~/models/Qwen3-0.6B --journal run.journal
      the embedded engine; sessions survive a restart

Open a session, point an agent at it:
  curl -X POST $URL/sessions -H "authorization: Bearer $ADMIN_KEY"
  OPENAI_BASE_URL=<base_url> OPENAI_API_KEY=<api_key> your-agent
"""


def add_serve(commands: Any) -> None:
    """Registers the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model to agents and record every call",
        description="Serves Chat Completions to agents, one session an episode, and records every call as "
        "exact tokens. A key is made and printed when none is given.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engine", choices=ENGINES, default="hf", help="what samples (default: %(default)s)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model's folder, for the embedded engine")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="a tokenizer's folder (default: the model's)"
    )
    parser.add_argument(
        "--engine-url", action="append", default=[], metavar="URL", help="a server; may be repeated"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8100, help="port to listen on, 0 for any (default: %(default)s)"
    )
    parser.add_argument(
        "--admin-key", default="", help="the key that opens everything (default: made and printed)"
    )
    parser.add_argument("--no-auth", action="store_true", help="no keys at all; listens on loopback only")
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="keep sessions here, so that they survive"
    )
    parser.add_argument(
        "--durability",
        choices=("process", "disk"),
        default="process",
        help="survive kill -9, or power loss too",
    )
    parser.add_argument(
        "--history",
        choices=("template", "verbatim"),
        default="template",
        help="show earlier turns as the chat template does, or as they were sampled (default: %(default)s)",
    )
    parser.add_argument("--tool-parser", metavar="NAME", help="format of tool calls (default: detected)")
    parser.add_argument("--reasoning-parser", metavar="NAME", help="format of reasoning (default: detected)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Serves until interrupted; what is running then is let end."""
    if options.no_auth and options.host not in ("127.0.0.1", "localhost", "::1"):
        raise InputError(
            f"--no-auth: got --host {options.host}, expected loopback: anybody could use the model"
        )
    codec, engine = _build(options)
    asyncio.run(_serve(options, codec, engine))
    return ""


async def _serve(options: argparse.Namespace, codec: Codec, engine: Engine) -> None:
    from branchline.gateway.config import GatewayConfig
    from branchline.gateway.server import Gateway

    for one in getattr(engine, "engines", [engine]):
        ready = getattr(one, "ready", None)
        if ready is not None:
            await ready()
    gateway = Gateway(
        engine=engine,
        codec=codec,
        journal=options.journal,
        durability=options.durability,
        history=options.history,
        host=options.host,
        port=options.port,
        config=GatewayConfig(admin_key=options.admin_key, auth=not options.no_auth),
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    async with gateway:
        session = await gateway.session()
        print(_welcome(gateway, session.base_url, session.api_key), flush=True)
        await stop.wait()
        print("branchline: letting running calls end", file=sys.stderr, flush=True)


def _welcome(gateway: Gateway, base_url: str, api_key: str) -> str:
    key = (
        f"admin key      {gateway.admin_key}\n"
        if gateway.admin_key
        else "no keys are asked for (--no-auth)\n"
    )
    return (
        f"branchline serves {gateway.app.fleet.name} on {gateway.url}\n{key}"
        f"a session      {base_url}\nits api key    {api_key}\ntry it:\n"
        f"  curl {base_url}/chat/completions -H 'authorization: Bearer {api_key}' "
        '-H \'content-type: application/json\' -d \'{"messages": [{"role": "user", "content": "hello"}]}\''
    )


def _build(options: argparse.Namespace) -> tuple[Codec, Engine]:
    if options.engine == "scripted":
        from branchline.chat.toy import ToyCodec
        from branchline.engines.scripted import ScriptedEngine

        toy = ToyCodec.chatml()
        return toy, ScriptedEngine(toy, lambda ask: f"You said: {ask.last_line}")
    from branchline.chat.generic.codec import GenericCodec

    folder = options.tokenizer or options.model
    if folder is None:
        wanted = "expected --tokenizer DIR or --model DIR; --engine scripted needs neither"
        raise InputError(f"--engine {options.engine}: {wanted}")
    codec = GenericCodec.open(
        folder, tool_parser=options.tool_parser, reasoning_parser=options.reasoning_parser
    )
    if options.engine == "hf":
        if options.model is None:
            raise InputError("--engine hf: expected --model DIR, a folder with weights")
        try:
            from branchline.engines.hf.engine import HfEngine
        except ImportError as error:
            raise InputError(
                "--engine hf needs torch and transformers: pip install 'branchline[hf]'"
            ) from error
        return codec, HfEngine.load(options.model, decode=lambda ids: codec.decode(as_ids(ids)))
    return codec, _servers(options)


def _servers(options: argparse.Namespace) -> Engine:
    from branchline.engines.replicas import Replicas
    from branchline.engines.sglang import SglangEngine
    from branchline.engines.vllm import VllmEngine

    if not options.engine_url:
        raise InputError(f"--engine {options.engine}: expected --engine-url URL, the address of its server")
    kind = VllmEngine if options.engine == "vllm" else SglangEngine
    engines = [kind(url) for url in options.engine_url]
    return engines[0] if len(engines) == 1 else Replicas(engines)
