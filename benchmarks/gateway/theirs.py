"""rllm-model-gateway as its README embeds it: `create_app` under uvicorn. Runs in any Python that has it.

Its logs are off, which its own command leaves on. Its stores are `sqlite` (the default) and `memory`. It
gets the event loop and the HTTP parser that uvicorn chooses for its command: the faster ones where they are
installed.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from importlib import import_module
from typing import Any

import uvicorn


async def main(options: dict[str, Any]) -> None:
    theirs = import_module("rllm_model_gateway")
    config = theirs.GatewayConfig(
        host="127.0.0.1",
        workers=[{"url": options["engine_url"] + "/v1", "model_name": "mock"}],
        store_worker=options["store"],
        db_path=options.get("db_path"),
        log_level="WARNING",
    )
    # With its protocol named: asyncio turns Nagle's delays off only where it is.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(theirs.create_app(config), log_level="warning", access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps({"cpu_s": time.process_time()}), flush=True)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    try:
        run = import_module("uvloop").run
    except ImportError:  # its own dependencies do without
        run = asyncio.run
    run(main(json.loads(sys.argv[1])))
