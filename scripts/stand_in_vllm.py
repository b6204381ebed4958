"""Stands in for vLLM servers: their protocol, with a model that hashes.

python scripts/stand_in_vllm.py MODEL_FOLDER PORT …
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "src")]

from tests.engines.fake_servers import FakeVllm  # noqa: E402


async def main(model: str, *ports: str) -> None:
    """Serves on every port until it is killed."""
    for port in ports:
        server = FakeVllm()
        server.json_by_path["/health"] = {}
        server.json_by_path["/version"] = {"version": "0.32.0"}
        server.json_by_path["/v1/models"] = {
            "data": [{"id": Path(model).name, "root": model, "max_model_len": 4096}]
        }
        await server.listen(int(port))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
