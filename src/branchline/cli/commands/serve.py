"""The options and texts of `branchline serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from branchline.cli.engine_options import EngineOptions
from branchline.cli.observability import ObservabilityOptions
from branchline.cli.options.command import Command
from branchline.core.choices import Durability, HistoryPolicy
from branchline.core.errors import InputError
from branchline.core.option_fields import group, option
from branchline.gateway.config import GatewayConfig


@dataclass(frozen=True)
class ServeOptions:
    """A gateway, its engine and its logs."""

    host: str = option("127.0.0.1", basic=True, metavar="ADDRESS")
    """Address to listen on."""
    port: int = option(8100, basic=True)
    """Port to listen on, 0 for any free one."""
    journal: Path | None = option(None, basic=True, metavar="FILE")
    """Record sessions in FILE, so that they survive a restart."""
    durability: Durability = option("process", needs={"journal": ()})
    """What a recorded call survives. process: kill -9; disk: power loss too."""
    history: HistoryPolicy = "template"
    """How earlier turns are rendered: as the chat template does, or kept as they were sampled."""
    engines: EngineOptions = group(EngineOptions, "engine")
    gateway: GatewayConfig = group(GatewayConfig, "gateway (docs/operations.md explains the limits)")
    logs: ObservabilityOptions = group(ObservabilityOptions, "logs")

    def __post_init__(self) -> None:
        if not self.host:
            raise InputError("host: got '', expected an address, such as 127.0.0.1, or 0.0.0.0 for all")
        if not 0 <= self.port <= 65535:
            raise InputError(f"port: got {self.port}, expected 0 to 65535")


_DESCRIPTION = """\
Serves Chat Completions, Responses, Anthropic Messages and Completions to agents, and records every call as
exact tokens. Each session is one episode: one task, one reward. Prints a base URL and an API key for a first
session, and how to open one for each episode; the log warns if a second task is sent to the first session.
"""
_EXAMPLES = """\
examples:
  branchline serve                      SmolLM2-135M-Instruct in this process, on a GPU or a CPU
  branchline serve --engine scripted    no model: echoes the last message, for testing a client
  branchline serve --engine vllm --engine-url http://127.0.0.1:8000
                                        a vLLM server, with the tokenizer of its model

Open a session and point an agent at it:
  curl -X POST $URL/sessions -H "authorization: Bearer $ADMIN_KEY"
  OPENAI_BASE_URL=<base_url> OPENAI_API_KEY=<api_key> your-agent
"""
_DETAILS = """\
more examples:
  branchline serve --engine vllm --engine-url http://host:8000 --tokenizer ~/models/Qwen3-8B
      the tokenizer in a folder, for a server whose model is not known here; repeat --engine-url for replicas
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
"""
COMMAND = Command(
    "serve",
    ServeOptions,
    "branchline.cli.serve:run",
    _DESCRIPTION,
    _EXAMPLES,
    _DETAILS,
    renamed={"allow_image_urls": "image_urls"},
)
