"""`branchline serve`: the gateway from a command line, with an engine chosen by name."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branchline.chat.base import Codec
from branchline.cli.engines import (
    ENGINE_KEY_ENV,
    ENGINE_NAMES,
    OPENAI_KEY_ENV,
    UPSTREAM_KEY_ENV_PREFIX,
    build_router,
)
from branchline.cli.observability import Observability, add_observability_options, configure_observability
from branchline.gateway.access import require_loopback
from branchline.gateway.config import GatewayConfig
from branchline.gateway.process import run_server
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS

if TYPE_CHECKING:
    from branchline.gateway.server import Gateway
    from branchline.runtime.router import Router

log = logging.getLogger("branchline.gateway")

ADMIN_KEY_ENV = "BRANCHLINE_ADMIN_KEY"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_EPILOG = """\
examples:
  branchline serve
      SmolLM2-135M-Instruct in this process, on a CPU if need be: nothing to configure
  branchline serve --engine scripted
      no model at all: replies by rule, to try a client or a protocol
  branchline serve --engine vllm --engine-url http://127.0.0.1:8000 --tokenizer ~/models/Qwen3-8B
      in front of a vLLM server that has the same model; give --engine-url again for each replica
  branchline serve --engine hf --model ~/models/Qwen3-0.6B --journal run.journal
      another model in this process; sessions survive a restart
  branchline serve --engine openai --engine-url https://host/v1
      capture what any OpenAI-compatible upstream says; its token ids are not known, so samples are inexact
  branchline serve --rule 'model=*haiku*,train=no' --rule 'agent=judge,engine=big,train=no' \
      --upstream big=https://host/v1
      calls for some models or of some agents are not trained, or go elsewhere; the first rule that fits

Open a session, point an agent at it:
  curl -X POST $URL/sessions -H "authorization: Bearer $ADMIN_KEY"
  OPENAI_BASE_URL=<base_url> OPENAI_API_KEY=<api_key> your-agent
"""


_DEFAULT_MODEL_MAX_TOKENS = 512


def add_serve(commands: Any) -> None:
    """Registers the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model to agents and record every call",
        description="Serves Chat Completions, Responses, Anthropic Messages and bare Completions to agents, "
        "one session an episode, and records every call as exact tokens. A key is made and printed when none "
        "is given.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--engine", choices=ENGINE_NAMES, default="hf", help="what samples (default: %(default)s)"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a model's folder (default: SmolLM2, unpacked once)"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="a tokenizer's folder (default: the model's)"
    )
    parser.add_argument(
        "--engine-url",
        action="append",
        default=[],
        metavar="URL",
        help=f"a server of the engine; repeat for replicas. Its key, if it wants one: {ENGINE_KEY_ENV}; for "
        f"--engine openai else {OPENAI_KEY_ENV}",
    )
    parser.add_argument(
        "--upstream",
        action="append",
        default=[],
        metavar="NAME=URL",
        help=f"an OpenAI-compatible upstream that rules may name. Its key: {UPSTREAM_KEY_ENV_PREFIX}NAME, else "
        f"{OPENAI_KEY_ENV}",
    )
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="KEY=VALUE,…",
        help="model=PATTERN, agent=PATTERN, engine=NAME, train=yes|no; the first that fits decides",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8100, help="port to listen on, 0 for any (default: %(default)s)"
    )
    parser.add_argument(
        "--admin-key",
        default="",
        help=f"the key that opens everything; better given as {ADMIN_KEY_ENV} (default: made and printed)",
    )
    parser.add_argument(
        "--public-url",
        default=GatewayConfig.public_url,
        metavar="URL",
        help="where clients reach it, told to them as base_url (default: the address each came by)",
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
    parser.add_argument(
        "--explain-forks", action="store_true", help="log why a request did not go on where the last ended"
    )
    parser.add_argument(
        "--max-in-flight",
        type=int,
        default=GatewayConfig.max_in_flight,
        metavar="N",
        help="generations at once; above, clients are told to come back (default: %(default)s)",
    )
    parser.add_argument(
        "--default-max-tokens",
        type=int,
        default=GatewayConfig.default_max_tokens,
        metavar="N",
        help="how long an answer may be where neither client nor session says (default: as long as its "
        f"prompt leaves room; {FALLBACK_MAX_TOKENS} where the engine does not say how much it can hold; "
        f"{_DEFAULT_MODEL_MAX_TOKENS} with the small model that comes without --model)",
    )
    parser.add_argument(
        "--idle-s",
        type=float,
        default=GatewayConfig.idle_s,
        metavar="S",
        help="finalize sessions that nobody has used for so long, 0: never (default: %(default)g)",
    )
    parser.add_argument(
        "--drain-s",
        type=float,
        default=GatewayConfig.drain_s,
        metavar="S",
        help="when told to stop, let calls go on for so long; a second signal stops at once "
        "(default: %(default)g)",
    )
    add_observability_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Serves until interrupted; what is running then is let end."""
    if options.no_auth:
        require_loopback(options.host)  # before a model is loaded for nothing
    codec, fleet = build_router(options)
    watching = configure_observability(options)
    try:
        run_server(_serve(options, codec, fleet, watching))
    finally:
        watching.close()
    return ""


async def _serve(options: argparse.Namespace, codec: Codec, fleet: Router, watching: Observability) -> None:
    from branchline.gateway.server import Gateway

    await fleet.check_ready()
    gateway = Gateway(
        engine=fleet,
        codec=codec,
        journal=options.journal,
        durability=options.durability,
        history=options.history,
        host=options.host,
        port=options.port,
        config=GatewayConfig(
            admin_key=options.admin_key or os.environ.get(ADMIN_KEY_ENV, ""),
            auth=not options.no_auth,
            max_in_flight=options.max_in_flight,
            default_max_tokens=_default_max_tokens(options),
            public_url=options.public_url,
            drain_s=options.drain_s,
            idle_s=options.idle_s,
            explain_forks=options.explain_forks,
        ),
        observers=watching.observers,
        on_session_end=watching.on_end,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        if not stop.is_set():
            stop.set()
            return
        gateway.stop_now()
        for name in _SIGNALS:  # a third one ends the process, whatever it is doing
            loop.remove_signal_handler(name)

    for name in _SIGNALS:
        loop.add_signal_handler(name, interrupted)
    async with gateway:
        session = await gateway.session()
        print(_startup_message(gateway, session.base_url, session.api_key), flush=True)
        await stop.wait()
        log.info("letting running calls end", extra={"drain_s": options.drain_s})


def _startup_message(gateway: Gateway, base_url: str, api_key: str) -> str:
    key = (
        f"admin key      {gateway.admin_key}\n"
        if gateway.admin_key
        else "no keys are asked for (--no-auth)\n"
    )
    return (
        f"branchline serves {gateway.app.router.name} on {gateway.url}\n{key}"
        f"a session      {base_url}\nits api key    {api_key}\ntry it:\n"
        f"  curl {base_url}/chat/completions -H 'authorization: Bearer {api_key}' "
        "-H 'content-type: application/json' "
        # With an end: a small model may talk until its context is full.
        '-d \'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}\''
    )


def _default_max_tokens(options: Any) -> int | None:
    """What was asked for; the model that comes by default seldom finds an end by itself."""
    if options.default_max_tokens is None and options.engine == "hf" and not options.model:
        return _DEFAULT_MODEL_MAX_TOKENS
    given: int | None = options.default_max_tokens
    return given
