"""`branchline serve`: a gateway on the command line, with an engine selected by name."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from branchline.chat.base import Codec, HistoryPolicy
from branchline.cli.engine_options import add_embedded_engine_options, add_engine_options, default_max_tokens
from branchline.cli.engines import build_router
from branchline.cli.observability import Observability, add_observability_options, configure_observability
from branchline.gateway.config import GatewayConfig
from branchline.gateway.process import run_server

if TYPE_CHECKING:  # the gateway needs packages of the `serve` extra
    from branchline.gateway.server import Gateway
    from branchline.runtime.router import Router

log = logging.getLogger("branchline.gateway")

ADMIN_KEY_ENV = "BRANCHLINE_ADMIN_KEY"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DESCRIPTION = """\
Serves Chat Completions, Responses, Anthropic Messages and Completions to agents, and records every call as
exact tokens. Each session is one episode: one task, one reward. Prints a base URL and an API key for a first
session, and how to open one for each episode; the log warns if a second task is sent to the first session.
"""
_EPILOG = """\
examples:
  branchline serve
      SmolLM2-135M-Instruct in this process, on a GPU or a CPU; needs no configuration
  branchline serve --engine scripted
      no model: echoes the last message, for testing a client
  branchline serve --engine vllm --engine-url http://127.0.0.1:8000
      a vLLM server, with the tokenizer of its model; repeat --engine-url for each replica
  branchline serve --engine vllm --engine-url http://host:8000 --tokenizer ~/models/Qwen3-8B
      the same with the tokenizer in a folder, for a server whose model is not known here
  branchline serve --engine hf --model Qwen/Qwen3-0.6B --journal run.journal
      another model in this process; sessions survive a restart
  branchline serve --engine openai --engine-url https://host/v1
      record any OpenAI-compatible upstream; its token ids are unknown, so samples are inexact
  branchline serve --rule 'model=*haiku*,train=no' --rule 'agent=judge,engine=big,train=no' \\
      --upstream big=https://host/v1
      exclude calls from training, or send them to an upstream, by model or agent name

A model or tokenizer is a folder or a Hugging Face name, NAME or NAME@REVISION. A name is looked up in the
local cache (HF_HUB_CACHE) first; what is missing there is fetched from the hub. Without access to the hub,
give a folder, or fill the cache elsewhere: hf download NAME

Open a session and point an agent at it:
  curl -X POST $URL/sessions -H "authorization: Bearer $ADMIN_KEY"
  OPENAI_BASE_URL=<base_url> OPENAI_API_KEY=<api_key> your-agent
"""


def add_serve(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model to agents and record every call",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_options(parser.add_argument_group("engine"))
    add_embedded_engine_options(parser.add_argument_group("embedded engine (--engine hf)"))
    server_options = parser.add_argument_group("server")
    _add_server_options(server_options)
    _add_image_options(server_options)
    _add_limit_options(parser.add_argument_group("limits (docs/operations.md explains each)"))
    _add_session_options(parser.add_argument_group("sessions"))
    add_observability_options(parser)
    parser.set_defaults(run=run)


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port", type=int, default=8100, help="port to listen on, 0 for any free one (default: %(default)s)"
    )
    group.add_argument(
        "--public-url",
        default=GatewayConfig.public_url,
        metavar="URL",
        help="the address for clients, used in base_url (default: the address of each request)",
    )
    group.add_argument(
        "--admin-key",
        default="",
        help=f"the key for all sessions; better set as {ADMIN_KEY_ENV}, where no other user sees it. It is "
        "printed only if it was generated (default: generated)",
    )
    group.add_argument(
        "--ignore-unknown-fields",
        action="store_true",
        help="ignore fields of requests that are not known or not supported by the engine, log each once and "
        "record them with the call (default: such a request is refused with 400, which names the field)",
    )
    group.add_argument("--no-auth", action="store_true", help="require no keys; listens on loopback only")
    group.add_argument(
        "--drain-s",
        type=float,
        default=GatewayConfig.drain_s,
        metavar="S",
        help="on SIGINT or SIGTERM, wait this long for running calls; a second signal stops at once "
        "(default: %(default)g)",
    )


_LIMITS: dict[str, str] = {
    "max_body_bytes": "the body of a request; longer ones get 413",
    "max_prompt_characters": "text in the messages and tools of a request",
    "max_messages": "messages in a request",
    "max_tools": "tools in a request",
    "max_json_values": "commas and opening brackets in a body, those in its texts included",
    "max_prompt_tokens": "tokens of a prompt (default: the engine's context)",
    "max_connections": "open connections; further ones replace idle ones or get 503. Lowered to what the "
    "process may open",
    "max_header_bytes": "request line and headers of a request; longer ones get 431",
    "header_timeout_s": "time to send request line and headers; then 408",
    "body_timeout_s": "silence in the middle of a body; then 408",
    "write_timeout_s": "time in which a client reads nothing of its answer; then its call is cancelled",
    "connection_idle_s": "time a connection is kept open for the next request",
}
"""Fields of `GatewayConfig` that are options, with their help."""


def _add_limit_options(group: argparse._ArgumentGroup) -> None:
    for name, text in _LIMITS.items():
        default = getattr(GatewayConfig, name)
        shown = "" if default is None else " (default: %(default)s)"
        in_seconds = name.endswith("_s")
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=float if in_seconds else int,
            default=default,
            metavar="S" if in_seconds else "N",
            help=text + shown,
        )


def _add_image_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--allow-image-urls",
        nargs="?",
        choices=("public", "any"),
        const="public",
        default=GatewayConfig.image_urls,
        dest="image_urls",
        help="fetch images that clients send as http(s) links: from public addresses, or from any, also "
        "local ones (default: links are refused; without a value: public)",
    )


def _add_session_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--journal", type=Path, metavar="FILE", help="record sessions in FILE, so that they survive a restart"
    )
    group.add_argument(
        "--durability",
        choices=("process", "disk"),
        default="process",
        help="what a recorded call survives: process: kill -9; disk: power loss too (default: %(default)s)",
    )
    group.add_argument(
        "--history",
        choices=get_args(HistoryPolicy),
        default="template",
        help="render earlier turns as the chat template does, or keep them as sampled (default: %(default)s)",
    )
    group.add_argument(
        "--idle-s",
        type=float,
        default=GatewayConfig.idle_s,
        metavar="S",
        help="finalize sessions after this time without requests, 0: never (default: %(default)g)",
    )
    group.add_argument(
        "--explain-forks", action="store_true", help="log why a request did not continue the last timeline"
    )


def run(options: argparse.Namespace) -> str:
    """Serves until a signal arrives, then waits for running calls for up to --drain-s seconds."""
    from branchline.gateway.access import require_loopback

    if options.no_auth:
        require_loopback(options.host)  # before the model is loaded
    codec, router = build_router(options)
    observability = configure_observability(options)
    try:
        run_server(_serve(options, codec, router, observability))
    finally:
        observability.close()
    return ""


async def _serve(
    options: argparse.Namespace, codec: Codec, router: Router, observability: Observability
) -> None:
    from branchline.gateway.server import Gateway

    await router.check_ready()
    given_key = options.admin_key or os.environ.get(ADMIN_KEY_ENV, "")
    gateway = Gateway(
        engine=router,
        codec=codec,
        journal=options.journal,
        durability=options.durability,
        history=options.history,
        host=options.host,
        port=options.port,
        config=GatewayConfig(
            admin_key=given_key,
            auth=not options.no_auth,
            max_in_flight=options.max_in_flight,
            default_max_tokens=default_max_tokens(options),
            public_url=options.public_url,
            drain_s=options.drain_s,
            idle_s=options.idle_s,
            explain_forks=options.explain_forks,
            image_urls=options.image_urls,
            **{name: getattr(options, name) for name in _LIMITS},
            ignore_unknown_fields=options.ignore_unknown_fields,
        ),
        observers=observability.observers,
        on_session_end=observability.on_end,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if not stop.is_set():
            stop.set()
            return
        gateway.skip_drain()
        for name in _SIGNALS:  # a third signal ends the process
            loop.remove_signal_handler(name)

    for name in _SIGNALS:
        loop.add_signal_handler(name, on_signal)
    async with gateway:
        session = await gateway.session()
        gateway.app.episode_check.watch(session.id)
        print(_startup_message(gateway, given_key, session.base_url, session.api_key), flush=True)
        await gateway.serve_until(stop)
        log.info("waiting for running calls", extra={"drain_s": options.drain_s})


def _startup_message(gateway: Gateway, given_key: str, base_url: str, api_key: str) -> str:
    if not gateway.app.config.auth:
        admin_key = "no keys required (--no-auth)"
    else:  # a key that was given is not repeated: startup messages end up in log files
        admin_key = f"admin key      {'as given' if given_key else gateway.admin_key}"
    open_command = f"curl -X POST {gateway.url}/sessions"
    if gateway.app.config.auth:
        key = f"${ADMIN_KEY_ENV}" if given_key else gateway.admin_key
        open_command += f' -H "authorization: Bearer {key}"'
    # max_tokens, because a small model may generate until its context is full.
    return (
        f"branchline serves {gateway.app.router.name} on {gateway.url}\n{admin_key}\n"
        f"base_url       {base_url}\napi_key        {api_key}\ntry it:\n"
        f"  curl {base_url}/chat/completions -H 'authorization: Bearer {api_key}' "
        "-H 'content-type: application/json' "
        '-d \'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}\'\n'
        "These are for one session, and a session is one episode: one task, one reward. "
        "Open one for each episode:\n"
        f"  {open_command}"
    )
