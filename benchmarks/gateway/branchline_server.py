"""Branchline's gateway in its own process, with commands for the benchmark."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.codec.conversations import CACHE
from benchmarks.gateway.mock_engine import MockEngine, agent_replies, plain_reply
from benchmarks.gateway.phase_timer import timed
from benchmarks.gateway.server_process import answer_commands
from branchline.chat.base import Codec, HistoryPolicy
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.toy import ToyCodec
from branchline.engines.base import Engine
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from branchline.gateway.process import run_server
from branchline.gateway.server import Gateway
from branchline.tree.journal import Durability

AGENT_REPLIES = 300
_PAGE_BYTES = 4096


class GatewayOptions(msgspec.Struct, frozen=True):
    """Settings of the measured gateway."""

    engine: Literal["plain", "agent", "vllm", "scripted"]
    """`plain`: one reply of 300 tokens; `agent`: replies with tool calls; both in this process."""
    history: HistoryPolicy = "template"
    journal: str | None = None
    durability: Durability = "process"
    engine_url: str = ""
    time_phases: bool = False
    """Whether to time the phases of each call; only for one request at a time."""


def scripted_reply(request: ScriptedRequest) -> str:
    return f"reply {request.call_index} of the scripted engine to {request.last_line[:20]!r}"


def _engine_and_codec(options: GatewayOptions) -> tuple[Engine, Codec]:
    if options.engine == "scripted":
        toy = ToyCodec.chatml()
        return ScriptedEngine(toy, scripted_reply), toy
    codec = GenericCodec.open(CACHE / "qwen3")
    if options.engine == "vllm":
        from branchline.engines.vllm import VllmEngine

        return VllmEngine(options.engine_url, model="mock"), codec
    replies = agent_replies(codec, AGENT_REPLIES) if options.engine == "agent" else [plain_reply(codec)]
    return MockEngine(replies), codec


def _memory(engine: Engine) -> Mapping[str, Any]:
    """Resident memory after a collection, without the prompts that the scripted engine keeps for tests."""
    if isinstance(engine, ScriptedEngine):
        engine.received_prompts.clear()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"bytes": pages * _PAGE_BYTES}


def _tree_counts(gateway: Gateway) -> Mapping[str, Any]:
    """Counts over all trees."""
    trees = [managed.session.tree for managed in gateway.sessions]
    return {
        "sessions": len(trees),
        "calls": sum(len(tree.calls) for tree in trees),
        "tokens": sum(tree.token_count for tree in trees),
        "sampled": sum(managed.sampled_tokens for managed in gateway.sessions),
    }


async def main(options: GatewayOptions, engine: Engine, codec: Codec) -> None:
    with ExitStack() as stack:
        timer = stack.enter_context(timed(type(engine))) if options.time_phases else None
        gateway = Gateway(
            engine=engine,
            codec=codec,
            journal=options.journal,
            durability=options.durability,
            history=options.history,
        )
        async with gateway:
            commands = {
                "memory": lambda: _memory(engine),
                "counts": lambda: _tree_counts(gateway),
                "phases": lambda: {"calls": timer.drain() if timer else []},
            }
            await answer_commands({"url": gateway.url, "key": gateway.admin_key}, commands)


if __name__ == "__main__":
    options = msgspec.json.decode(sys.argv[1].encode(), type=GatewayOptions)
    run_server(main(options, *_engine_and_codec(options)))  # as `branchline serve` does
