"""`branchline serve`: a gateway on the command line, with an engine selected by name."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from branchline.cli.commands.serve import ServeOptions
from branchline.cli.engine_options import default_max_tokens
from branchline.cli.engines import build_router
from branchline.cli.observability import Observability, configure_observability
from branchline.gateway.process import run_server

if TYPE_CHECKING:  # the gateway needs packages of the `serve` extra
    from branchline.chat.base import Codec
    from branchline.gateway.server import Gateway
    from branchline.runtime.router import Router

log = logging.getLogger("branchline.gateway")

ADMIN_KEY_ENV = "BRANCHLINE_ADMIN_KEY"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(options: ServeOptions) -> str:
    """Serves until a signal arrives, then waits for running calls for up to --drain-s seconds."""
    from branchline.gateway.access import require_loopback
    from branchline.gateway.uvicorn_server import bind_socket

    # Before the model is loaded.
    if not options.gateway.auth:
        require_loopback(options.host)
    bind_socket(options.host, options.port).close()
    codec, router = build_router(options.engines)
    observability = configure_observability(options.logs)
    try:
        run_server(_serve(options, codec, router, observability))
    finally:
        observability.close()
    return ""


async def _serve(options: ServeOptions, codec: Codec, router: Router, observability: Observability) -> None:
    from branchline.gateway.server import Gateway

    await router.check_ready()
    config = replace(options.gateway, default_max_tokens=default_max_tokens(options.engines, options.gateway))
    gateway = Gateway(
        engine=router,
        codec=codec,
        journal=options.journal,
        durability=options.durability,
        history=options.history,
        host=options.host,
        port=options.port,
        config=config,
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
        print(_startup_message(gateway, config.admin_key, session.base_url, session.api_key), flush=True)
        await gateway.serve_until(stop)
        log.info("waiting for running calls", extra={"drain_s": config.drain_s})


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
