"""rllm-model-gateway as in its README: `create_app` under uvicorn. Runs in any Python that has it.

Its logs are off, unlike with its own command. Its stores are `sqlite` (the default) and `memory`. With its
own requirements uvicorn runs on asyncio and h11; `fast` uses uvloop and httptools, which uvicorn uses if they
are installed.
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
    rllm = import_module("rllm_model_gateway")
    config = rllm.GatewayConfig(
        host="127.0.0.1",
        workers=[{"url": options["engine_url"] + "/v1", "model_name": "mock"}],
        store_worker=options["store"],
        db_path=options.get("db_path"),
        log_level="WARNING",
    )
    # With an explicit protocol: asyncio disables Nagle's algorithm only then.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    http = "httptools" if options["fast"] else "h11"
    app = rllm.create_app(config)
    server = uvicorn.Server(uvicorn.Config(app, http=http, log_level="warning", access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps({"cpu_s": time.process_time()}), flush=True)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    (import_module("uvloop") if options["fast"] else asyncio).run(main(options))
