"""Our gateway as a process of its own, with commands for whoever measures it."""

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
    """How the gateway under measurement runs."""

    engine: Literal["plain", "agent", "vllm", "scripted"]
    """`plain`: one reply of 300 tokens; `agent`: replies with calls; both in this process."""
    history: HistoryPolicy = "template"
    journal: str | None = None
    durability: Durability = "process"
    engine_url: str = ""
    marks: bool = False
    """Whether to note where each call's time goes; only for one request at a time."""


def scripted_reply(ask: ScriptedRequest) -> str:
    return f"reply {ask.call_index} of the scripted engine to {ask.last_line[:20]!r}"


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
    """What is resident once garbage is gone. The scripted engine remembers prompts for tests; not here."""
    if isinstance(engine, ScriptedEngine):
        engine.received_prompts.clear()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"bytes": pages * _PAGE_BYTES}


def _tree_counts(gateway: Gateway) -> Mapping[str, Any]:
    """What the trees hold."""
    trees = [live.session.tree for live in gateway.sessions]
    return {
        "sessions": len(trees),
        "calls": sum(len(tree.calls) for tree in trees),
        "tokens": sum(tree.token_count for tree in trees),
        "sampled": sum(live.sampled_tokens for live in gateway.sessions),
    }


async def main(options: GatewayOptions, engine: Engine, codec: Codec) -> None:
    with ExitStack() as stack:
        marks = stack.enter_context(timed(type(engine))) if options.marks else None
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
                "tally": lambda: _tree_counts(gateway),
                "marks": lambda: {"calls": marks.drain() if marks else []},
            }
            await answer_commands({"url": gateway.url, "key": gateway.admin_key}, commands)


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1].encode(), type=GatewayOptions)
    run_server(main(given, *_engine_and_codec(given)))  # as `branchline serve` does
